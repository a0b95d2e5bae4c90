import pytest

from gateway.protocol.errors import InvalidState
from gateway.seal import token_check
from gateway.seal.client_state import Item
from gateway.seal.request_state import SKEW_SECONDS

NOW = 1_000.0
ITEM = Item("log-level", "/mcp", b"ada", NOW, "gw-1", "info")


@pytest.mark.parametrize("now", [NOW - SKEW_SECONDS, NOW, NOW + 10])
def test_a_token_opens_for_its_caller_on_its_route_in_its_time(now: float) -> None:
    token_check.check(ITEM, "/mcp", b"ada", now, NOW + 10)


@pytest.mark.parametrize(
    ("route", "principal", "now", "reason"),
    [
        ("/other", b"ada", NOW, "other_route"),
        ("/mcp", b"eve", NOW, "other_principal"),
        ("/mcp", b"ada", NOW - SKEW_SECONDS - 1, "future"),
        ("/mcp", b"ada", NOW + 11, "expired"),
        ("/other", b"eve", NOW + 11, "other_route"),
        ("/mcp", b"eve", NOW + 11, "other_principal"),
    ],
)
def test_any_other_token_is_rejected_with_the_first_reason(
    route: str, principal: bytes, now: float, reason: str
) -> None:
    with pytest.raises(InvalidState) as caught:
        token_check.check(ITEM, route, principal, now, NOW + 10)
    assert caught.value.reason == reason
