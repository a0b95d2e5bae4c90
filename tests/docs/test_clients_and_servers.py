"""docs/clients-and-servers.md names files that exist."""

import re

import pytest

from tests.parts.launch import REPOSITORY

PAGE = (REPOSITORY / "docs" / "clients-and-servers.md").read_text()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:gateway|tests)/[\w/]+\.py)", PAGE))))
def test_every_file_exists(path: str) -> None:
    assert (REPOSITORY / path).is_file()
