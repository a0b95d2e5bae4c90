import pytest
from msgspec import Struct

from gateway.config import InForce
from gateway.protocol.errors import InvalidState
from gateway.seal.claims import SKEW_SECONDS, Bearer, Claims
from gateway.seal.keyring import Keys

KEY, OTHER = bytes(32), bytes(range(32))
NOW = 1_000.0


class Content(Struct, frozen=True, array_like=True):
    text: str


def claims(*keys: bytes, purpose: str = "one", fits: int | None = None) -> Claims[Content]:
    return Claims(InForce(Keys(keys or (KEY,))), purpose, Content, 200, None if fits is None else InForce(fits))


def reason(token: str, by: Claims[Content]) -> str:
    with pytest.raises(InvalidState) as caught:
        _ = by.open(token)
    assert not by.opens(token)
    return caught.value.reason


def test_a_claim_opens_for_its_purpose_under_its_keys() -> None:
    token = claims().seal(Content("a"))
    assert claims().open(token) == claims(OTHER, KEY).open(token) == Content("a")
    assert claims().opens(token)
    assert reason(token, claims(purpose="two")) == "forged"
    assert reason(token, claims(OTHER)) == "unknown_key"
    assert reason(token + "A" * 200, claims()) == "too_large"
    assert not claims().opens(None)


def test_a_former_key_opens_only_what_may_be_that_old() -> None:
    token, keys = claims(OTHER).seal(Content("a")), InForce(Keys((KEY,), (OTHER,)))
    assert Claims(keys, "one", Content, 200, opens_former=True).open(token) == Content("a")
    assert reason(token, Claims(keys, "one", Content, 200)) == "unknown_key"


def test_a_claim_follows_a_change_of_keys() -> None:
    keys = InForce(Keys((KEY,)))
    by = Claims(keys, "one", Content, 200)
    keys.replace(Keys((OTHER,)))
    assert claims(OTHER).open(by.seal(Content("a"))) == Content("a")


@pytest.mark.parametrize("fits", range(90, 100))
def test_the_first_version_that_fits_is_sealed_or_else_the_last(fits: int) -> None:
    by = claims(fits=fits)
    versions = [Content("x" * size) for size in (50, 20, 16, 14, 12, 10, 8)]
    opened = by.open(by.seal(*versions))
    lengths = {each.text: len(claims().seal(each)) for each in versions}
    assert opened == next(each for each in versions if lengths[each.text] <= fits)
    assert by.open(by.seal(Content("x" * 50))) == Content("x" * 50), "there is no smaller one"


@pytest.mark.parametrize("now", [NOW - SKEW_SECONDS, NOW, NOW + 10])
def test_a_claim_counts_for_its_caller_on_its_route_in_its_time(now: float) -> None:
    Bearer("/mcp", b"ada", now, lambda _: b"").check("/mcp", b"ada", issued=NOW, expires=NOW + 10)


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
def test_any_other_claim_is_rejected_with_the_first_reason(
    route: str, principal: bytes, now: float, reason: str
) -> None:
    with pytest.raises(InvalidState) as caught:
        Bearer(route, principal, now, lambda _: b"").check("/mcp", b"ada", issued=NOW, expires=NOW + 10)
    assert caught.value.reason == reason
