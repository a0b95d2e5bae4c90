import pytest

from tests.support.fake_upstream import FakeUpstream
from tests.support.known_calls import Gate


@pytest.fixture
def gate(upstream: FakeUpstream) -> Gate:
    found = Gate()
    upstream.tool(found)
    return found
