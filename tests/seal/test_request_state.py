"""The envelope: bound to its request, in time, within its size; unreadable to its bearer."""

import base64
import hmac
import json
import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.structs import replace

from gateway.config import InForce
from gateway.exchange.input_requests import Question
from gateway.exchange.replay_ledger import MAX_RECORD_BYTES, Recorded
from gateway.protocol.errors import InvalidParams, InvalidState, StateFromFuture
from gateway.protocol.request import Request
from gateway.protocol.request_meta import Capabilities, Declarations
from gateway.seal import request_state as envelopes
from gateway.seal.claims import Bearer, Claims
from gateway.seal.keyring import Keyring, Keys
from gateway.seal.request_state import (
    MOST,
    SKEW_SECONDS,
    Binding,
    Envelope,
    Whereabouts,
    bind,
    check,
    digest_answers,
    pack_record,
    states,
    unpack_record,
)
from gateway.telemetry.metrics.labels import STATE_REASONS

KEY = bytes(range(32))
NOW = 1_800_000_000.0
PRINCIPAL = b"p" * 32


def request(arguments: str = '{"a":1}', method: str = "tools/call", target: str = "tool") -> Request:
    return Request(
        id=Raw(b"1"),
        method=method,
        params={"name": Raw(msgspec.json.encode(target)), "arguments": Raw(arguments.encode())},
        target=target,
        said=Declarations("2026-07-28", Raw(b"{}"), Capabilities(), None, None, Raw(b"{}"), {}),
        input_responses=None,
        request_state=None,
    )


def bearer(principal: bytes = PRINCIPAL, now: float = NOW, route: str = "/mcp", **headers: str) -> Bearer:
    return Bearer(
        route, principal, now, lambda names: ",".join(f"{name}={headers.get(name)}" for name in names).encode()
    )


def bound(route: str, given: Request, principal: bytes) -> Binding:
    """The binding of a request on a route that binds no headers."""
    return bind(bearer(principal, route=route), given, ())


def opened(by: Claims[Envelope], state: str, now: float = NOW, given: Request | None = None, **who: Any) -> Envelope:
    envelope = by.open(state)
    check(envelope, bearer(now=now, **who), given or request())
    return envelope


BINDING = bound("/mcp", request(), PRINCIPAL)
QUESTION = Question("k", "elicitation/create", b"0", b"d" * 16, b'{"message":"Name?"}')
WHERE = Whereabouts("s", "2025-11-25", b'"c"', b'{"name":"old"}', "9")
RECORD = (Recorded("k", b"d" * 16, 0, b'{"action":"accept"}'), Recorded("l", b"e" * 16, 1, b"{}"))
ENVELOPE = Envelope(
    issued=NOW,
    expires=NOW + 600,
    binding=BINDING,
    exchange="e",
    round=1,
    owner="gw-1",
    epoch="x",
    state="parked",
    open=(QUESTION,),
)


def sealer(max_bytes: int = 8192) -> Claims[Envelope]:
    return states(InForce(Keys((KEY,))), InForce(max_bytes))


def reason(state: str, given: Request | None = None, now: float = NOW, **who: Any) -> str:
    with pytest.raises(InvalidState) as caught:
        opened(sealer(), state, now, given, **who)
    assert caught.value.reason in STATE_REASONS, "every reason is a label"
    assert (caught.value.message, caught.value.code, caught.value.status) == (
        "Invalid or expired requestState",
        -32602,
        400,
    )
    return caught.value.reason


def test_an_envelope_comes_back_whole() -> None:
    wordless = replace(QUESTION, key="l", params=None, upstream_id=None)
    full = replace(ENVELOPE, sheds=3, open=(QUESTION, wordless), upstream=WHERE, record=pack_record(RECORD))
    assert opened(sealer(), sealer().seal(full)) == full
    assert unpack_record(full.record or b"") == RECORD
    for part in (replace(WHERE, cursor=None), None):
        less = replace(full, upstream=part, record=b"", open=())
        assert opened(sealer(), sealer().seal(less)) == less
    assert opened(sealer(), sealer().seal(ENVELOPE)) == ENVELOPE


def test_a_path_that_is_not_utf_8_is_another_route() -> None:
    path = b"/mcp\xff".decode("utf-8", "surrogateescape")
    assert reason(sealer().seal(ENVELOPE), route=path) == "other_route"


@pytest.mark.parametrize(
    ("route", "given_request", "principal", "field"),
    [
        ("/two", request(), PRINCIPAL, "route"),
        ("/mcp", request(method="prompts/get"), PRINCIPAL, "method"),
        ("/mcp", request(target="other"), PRINCIPAL, "target"),
        ("/mcp", request('{"a":2}'), PRINCIPAL, "arguments"),
        ("/mcp", request("{}"), PRINCIPAL, "arguments"),
        ("/mcp", request(), b"q" * 32, "principal"),
    ],
)
def test_the_state_of_one_request_does_not_serve_another(
    route: str, given_request: Request, principal: bytes, field: str
) -> None:
    assert reason(sealer().seal(ENVELOPE), given_request, route=route, principal=principal) == f"other_{field}"


def test_a_state_counts_until_its_time_is_over() -> None:
    state = sealer().seal(ENVELOPE)
    assert opened(sealer(), state, NOW + 600) == ENVELOPE
    assert reason(state, now=NOW + 600.001) == "expired"


def test_a_state_from_the_future_can_be_sent_again() -> None:
    with pytest.raises(StateFromFuture) as caught:
        opened(sealer(), sealer().seal(ENVELOPE), NOW - SKEW_SECONDS - 0.001)
    assert (caught.value.status, caught.value.data) == (503, {"reason": "owner_stalled"})
    assert "60 s ahead" in caught.value.message
    assert "clock" in caught.value.fix


def test_only_the_request_of_a_state_learns_that_it_is_from_the_future() -> None:
    state = sealer().seal(ENVELOPE)
    assert reason(state, now=NOW - SKEW_SECONDS - 1, principal=b"q" * 32) == "other_principal"


def test_another_version_or_shape_is_refused() -> None:
    for version in (0, 1, 3):
        assert reason(sealer().seal(replace(ENVELOPE, version=version))) == "version"
    for content in (b"", b"\xc1", b"{}", msgspec.msgpack.encode([1]), msgspec.msgpack.encode({"a": 1})):
        assert reason(Keyring((KEY,), "state").seal(content)) == "version"


def test_a_state_larger_than_any_that_is_sealed_is_refused() -> None:
    state = sealer().seal(ENVELOPE)
    for size in (MOST + 1, 10_000_000):
        assert reason(state + "A" * (size - len(state))) == "too_large"
    assert reason(state + "A" * (MOST - len(state))) != "too_large"


def test_a_state_that_was_issued_under_a_larger_limit_still_opens() -> None:
    large = replace(ENVELOPE, open=(replace(QUESTION, params=b"x" * 40_000),))
    assert opened(sealer(1024), sealer(MOST).seal(large)) == large


def test_sixty_four_questions_with_long_keys_pass_the_cap_but_the_rest_does_not() -> None:
    """The driver drops what only other replicas need: see tests/net, where such a call completes."""
    many = replace(ENVELOPE, open=tuple(replace(QUESTION, key=f"{number:03d}" + "k" * 125) for number in range(64)))
    assert sealer().fitting(many) is None
    assert len(sealer(1024).fitting(replace(many, open=())) or "") in range(1, 1024)


@pytest.mark.parametrize("record", [(), RECORD, RECORD[:1], (Recorded("é\U0001f600", b"", 9, bytes(range(256))),)])
def test_a_record_comes_back_whole(record: tuple[Recorded, ...]) -> None:
    packed = pack_record(record)
    assert unpack_record(packed) == record
    assert pack_record(list(record)) == packed, "any sequence will do"


def test_a_record_is_small_and_its_length_tells_of_nothing_else() -> None:
    answers = tuple(Recorded(f"k{number}", b"d" * 16, number, b'{"action":"accept"}') for number in range(50))
    assert pack_record(()) == b""
    assert len(pack_record(answers)) < 600
    sealed = [sealer().seal(replace(ENVELOPE, record=pack_record(RECORD), owner=owner)) for owner in ("aaaa", "bcde")]
    assert len(sealed[0]) == len(sealed[1])


def no_record(packed: bytes) -> str:
    with pytest.raises(InvalidState) as caught:
        unpack_record(packed)
    return caught.value.reason


def test_what_is_no_record_is_refused_and_never_crashes() -> None:
    packed = pack_record(RECORD)
    shapes: list[Any] = [None, 1, {}, [1], [["k", b"d", 0]], [["k", b"d", "0", b"a"]], [[b"k", b"d", 0, b"a"]], "text"]
    invalid_text = b"\x91\x94\xa1\xff\xc4\x00\x00\xc4\x00"
    inner = [*(msgspec.msgpack.encode(shape) for shape in shapes), b"", b"\xc1", b"\x91", invalid_text]
    trailing = msgspec.msgpack.encode(RECORD) + b"\x90"
    for bad in (
        b"x",
        b"garbage",
        bytes(100),
        packed[:1],
        packed[:20],
        *(zlib.compress(content) for content in (*inner, trailing)),
    ):
        assert no_record(bad) == "version", bad


def test_a_bomb_is_inflated_to_its_bound_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    inflated: list[int] = []
    decode = msgspec.msgpack.Decoder(tuple[Recorded, ...]).decode

    class Noting:
        def decode(self, content: bytes) -> tuple[Recorded, ...]:
            inflated.append(len(content))
            return decode(content)

    monkeypatch.setattr(envelopes, "_RECORD", Noting())
    bound = 4_194_304
    bombs = [
        zlib.compress(bytes(20 * bound), 9),
        zlib.compress(msgspec.msgpack.encode((Recorded("k", b"", 0, bytes(bound)),)), 9),
        zlib.compress(msgspec.msgpack.encode([Recorded("k", b"", 0, b"")] * (bound // 4)), 9),
    ]
    for bomb in bombs:
        assert len(bomb) < 100_000
        assert no_record(bomb) == "version"
    assert inflated == [bound] * len(bombs), "never more than its bound"
    whole = pack_record((Recorded("k", b"", 0, bytes(bound - 20)),))
    assert len(unpack_record(whole)[0].answer) == bound - 20, "and all of what is within it"


def test_what_an_exchange_records_is_far_within_the_bound() -> None:
    assert MAX_RECORD_BYTES * 8 < 4_194_304


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a":1}', '{"a":"1"}'),
        ('{"a":1}', '{"a":true}'),
        ('{"a":0}', '{"a":false}'),
        ('{"a":null}', "{}"),
        ('{"a":[]}', '{"a":{}}'),
        ('{"a":[1,2]}', '{"a":[2,1]}'),
        ('{"a":""}', '{"a":null}'),
        ('{"a":9007199254740993}', '{"a":9007199254740992}'),
        ('{"a":18446744073709551617}', '{"a":18446744073709551618}'),
        ('{"a":"e\\u0301"}', '{"a":"\\u00e9"}'),
        # Decided: an integer and a float are two values. No client that repeats its arguments mixes them, and a
        # server in a typed language can tell them apart.
        ('{"a":1}', '{"a":1.0}'),
        ('{"a":0.0}', '{"a":-0.0}'),
    ],
)
def test_different_arguments_bind_differently(one: str, other: str) -> None:
    assert bound("/mcp", request(one), PRINCIPAL).arguments != bound("/mcp", request(other), PRINCIPAL).arguments


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, JSON)
def test_the_digest_of_arguments_is_that_of_their_value(one: Any, other: Any) -> None:
    def digest(value: Any, **style: Any) -> bytes:
        return bound("/mcp", request(json.dumps(value, **style)), PRINCIPAL).arguments

    assert digest(one) == digest(one, indent=1, ensure_ascii=False)
    if repr(one) != repr(other) and json.dumps(one, sort_keys=True) != json.dumps(other, sort_keys=True):
        assert digest(one) != digest(other)


def test_answers_that_have_no_digest_are_refused_and_the_call_still_waits() -> None:
    with pytest.raises(InvalidParams, match="the call still waits"):
        digest_answers({"key": Raw(b"[" * 1_000_000 + b"]" * 1_000_000)})


def test_arguments_that_have_no_digest_are_refused_and_never_crash() -> None:
    with pytest.raises(InvalidParams):
        bound("/mcp", request("[" * 1_000_000 + "]" * 1_000_000), PRINCIPAL)


def test_everything_that_goes_upstream_is_bound_not_only_the_arguments() -> None:
    more = request()
    more.params["task"] = Raw(b"{}")
    assert bound("/mcp", more, PRINCIPAL) != BINDING


def test_answers_are_named_by_their_values() -> None:
    def digest(text: str) -> bytes:
        return digest_answers(msgspec.json.decode(text.encode(), type=dict[str, Raw]))

    assert digest('{"a":{"x":1,"y":2},"b":{}}') == digest('{"b": {}, "a": {"y": 2, "x": 1}}')
    names = ["{}", '{"a":{}}', '{"b":{}}', '{"a":{"x":1}}', '{"a":{"x":2}}', '{"a":{"x":"1"}}', '{"a":{},"b":{}}']
    assert len({digest(text) for text in names}) == len(names)


def test_nothing_of_the_state_can_be_read_from_its_token() -> None:
    secrets = ["canary-tool", "canary-argument", "canary-answer", "canary-session", "canary-principal", "/canary"]
    binding = bound(secrets[5], request('{"a":"canary-argument"}', target=secrets[0]), secrets[4].encode())
    state = sealer().seal(
        replace(
            ENVELOPE,
            binding=binding,
            upstream=replace(WHERE, session=secrets[3]),
            open=(replace(QUESTION, upstream_id=b'"canary-id"', params=b'"canary-question"'),),
            record=pack_record((Recorded("k", b"", 0, secrets[2].encode()),)),
        )
    )
    body = state.rpartition(".")[2]
    raw = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
    for shown in (state.encode(), raw):
        assert b"canary" not in shown
    opened = Keyring((KEY,), "state").open(state)
    assert b"canary-session" in opened, "the search would find it"
    for hidden in ("canary-tool", "canary-argument"):
        assert hidden.encode() not in opened, "even the opened envelope has digests only"


def test_fields_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def note(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", note)
    opened(sealer(), sealer().seal(ENVELOPE))
    bound = b"".join(one for one, _ in compared)
    fields = [getattr(ENVELOPE.binding, name) for name in Binding.__struct_fields__ if name != "names"]
    assert all((field.encode() if isinstance(field, str) else field) in bound for field in fields)


# -- headers that are credentials -------------------------------------------------------------------------------------


KEYED = bind(bearer(**{"x-key": "mine"}), request(), ("x-key",))


def opens(state: str, **values: str) -> bool:
    """Whether it opens for a request with these headers."""
    by = bearer(**{name.replace("_", "-"): value for name, value in values.items()})
    try:
        check(sealer().open(state), by, request())
    except InvalidState as exc:
        return exc.reason != "other_headers"
    return True


def test_a_state_opens_with_the_headers_that_it_was_sealed_with() -> None:
    """It names them itself, whatever the route binds now."""
    state = sealer().seal(replace(ENVELOPE, binding=KEYED))
    assert opens(state, x_key="mine", x_other="1")
    assert not opens(state, x_key="stolen")
    assert not opens(state, x_key="")
    assert not opens(state)
    without = bind(bearer(), request(), ("x-key",))
    state = sealer().seal(replace(ENVELOPE, binding=without))
    assert opens(state)
    assert not opens(state, x_key="mine")
    assert opens(sealer().seal(ENVELOPE), x_key="any")
