"""Targets that decide about trust: sealed states or tokens, peer messages, `Host` and `Origin`, bearer tokens."""

import json
import re
import string
from contextlib import suppress
from typing import Any

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric import ed25519
from msgspec.structs import replace
from multidict import CIMultiDict

from gateway.auth.host_check import HostCheck, check_admin
from gateway.config import Config, InForce, Security
from gateway.exchange.input_requests import Question
from gateway.identity import principal
from gateway.identity.jwt_verification import BadToken, read_keys, verify
from gateway.mirror.call_rounds import Progress
from gateway.mirror.client_requests import LegacyRequest, Profile
from gateway.mirror.streamable import tokens
from gateway.mirror.streamable.tokens import CallPlace, MirroredSession, NoSession, Tokens
from gateway.protocol.errors import Forbidden, InvalidState, StateFromFuture
from gateway.seal import handoff
from gateway.seal.claims import Bearer
from gateway.seal.keyring import Keyring, Keys
from gateway.seal.peer_messages import Frames, PeerRequest, PeerSealer
from gateway.seal.request_state import Envelope, bind, check, states
from tests.seal.test_request_state import request
from tests.support.signer import ISSUER, jwks, public_jwk

NOW = 1_800_000_000.0
KEY = bytes(range(32))
BEARER = Bearer("/mcp", b"p" * 32, NOW, lambda _: b"")
STATED = request()
BINDING = bind(BEARER, STATED)
ENVELOPE = Envelope(
    issued=NOW,
    expires=NOW + 600,
    binding=BINDING,
    exchange="x" * 22,
    round=1,
    owner="gw-1",
    epoch="e",
    state="parked",
)
STATE_KEYS = InForce(Keys((KEY,)))
STATES = Keyring([KEY], "state")
PEERS = Keyring([KEY], "peer")
TOKENS = Tokens(STATE_KEYS)
SESSION = MirroredSession("s", "/mcp", b"p" * 32, NOW, Profile("2025-11-25", b"{}", b"{}"))
CALL = LegacyRequest(b"1", "tools/call", b'{"name":"t"}')
ROUND = Progress(1, b'"state"')
ASKING = (Question("k", "roots/list", None, params=b"{}"),)
PLACE = CallPlace(
    "s", "x", "gw-1", "e", NOW, 1, b"1", key="k", has_state=True, request=CALL, progress=ROUND, asking=ASKING
)
_RINGS = {kind[7:8]: Keyring([KEY], kind) for kind in (tokens.SESSION, tokens.NESTED, tokens.EVENT)} | {
    "r": Keyring([KEY], tokens.STATE)
}
_MIRRORED = {
    "s": _RINGS["s"].seal(msgspec.msgpack.encode(SESSION)),
    "n": TOKENS.of_place(tokens.NESTED, PLACE),
    "e": TOKENS.of_place(tokens.EVENT, PLACE),
    "r": TOKENS.of_place(tokens.STATE, PLACE),
}
SEALER = states(STATE_KEYS, InForce(8192))
HOP = PeerRequest(kind="owner", to="gw-1", issued=NOW, nonce=b"n" * 16, path="/mcp", body=b"{}")
HOST_CHECKS = (
    HostCheck(Security(), "127.0.0.1:8080"),
    HostCheck(Security(), "0.0.0.0:8080"),
    HostCheck(Security(allowed_hosts=("gw.example",), allowed_origins=("https://app.example",)), "0.0.0.0:8080"),
)
SIGNING_KEY = ed25519.Ed25519PrivateKey.from_private_bytes(KEY)
KEYS = read_keys(jwks(public_jwk(SIGNING_KEY)))


def edited(data: bytes, edits: bytes) -> bytes:
    """Bytes with some replaced: every three bytes of `edits` are a place and a value."""
    changed = bytearray(data)
    for at in range(0, len(edits) - 2, 3):
        changed[int.from_bytes(edits[at : at + 2]) % len(changed)] = edits[at + 2]
    return bytes(changed)


def sealed_state(data: bytes) -> None:
    """A letter, then edits of a genuine state (`e`), a text (`t`), or the content of a state (`c`): only InvalidState.

    A state that was edited never opens. A genuine one with any content opens as it was sealed, or not at all.
    """
    kind, rest = data[:1], data[1:]
    if kind == b"e":
        genuine = SEALER.seal(ENVELOPE).encode()
        state = edited(genuine, rest)
        assert (_opened(state.decode("latin-1")) is not None) is (state == genuine), "an edited state opened"
        for last in string.ascii_letters.encode() if not rest else b"":
            spelled = genuine[:-1] + bytes([last])
            assert (_opened(spelled.decode()) is not None) is (spelled == genuine), "another spelling opened"
    elif kind == b"t":
        assert _opened(rest.decode("utf-8", "surrogatepass" if _has_surrogates(rest) else "replace")) is None
    else:
        _content(rest)


def _has_surrogates(data: bytes) -> bool:
    try:
        _ = data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    return True


def _opened(state: str) -> Envelope | None:
    try:
        envelope = SEALER.open(state)
        check(envelope, BEARER, STATED)
    except (InvalidState, StateFromFuture):
        return None
    return envelope


def _content(plain: bytes) -> None:
    _ = _opened(STATES.seal(plain))
    try:
        envelope = replace(msgspec.msgpack.decode(plain, type=Envelope), binding=BINDING)
        state = SEALER.seal(envelope)
    except (ValueError, msgspec.MsgspecError):
        return
    again = _opened(state)
    assert again is None or again == envelope, "a state opened with another content"
    if again is not None:
        try:
            _ = handoff.past(again)
        except InvalidState:
            return


def peer_message(data: bytes) -> None:
    """A letter, then edits of a genuine request (`e`), a request (`r`), frames (`f`) or contents: only InvalidState.

    A request that was edited never opens, and a genuine one opens once.
    """
    kind, rest = data[:1], data[1:]
    peers = PeerSealer(InForce(Keys((KEY,))))
    if kind == b"e":
        genuine = peers.seal(HOP)
        request = edited(genuine, rest)
        assert _accepts(peers, request) is (request == genuine), "an edited request opened"
        assert not (request == genuine and _accepts(peers, request)), "a request opened twice"
    elif kind == b"r":
        assert not _accepts(peers, rest)
    elif kind == b"f":
        try:
            assert not Frames(PEERS, b"n").feed(rest)
        except InvalidState:
            return
    else:
        _ = _accepts(peers, PEERS.seal_bytes(rest, b"request"))
        sealed = PEERS.seal_bytes(rest, b"reply" + b"n" + bytes(8))
        try:
            _ = Frames(PEERS, b"n").feed(len(sealed).to_bytes(4) + sealed)
        except InvalidState:
            return


def _accepts(peers: PeerSealer, sealed: bytes) -> bool:
    try:
        _ = peers.open(sealed, NOW)
    except InvalidState:
        return False
    return True


def host_and_origin(data: bytes) -> None:
    """A host, a line end, an origin: only Forbidden; what passes names this gateway, by a plain reading."""
    host, _, origin = data.decode(errors="surrogateescape").partition("\n")
    bare = re.split("[/?#]", re.sub("[\t\r\n]", "", host))[0].rpartition("@")[2].lower()
    readings = {part.strip("[]") for part in (bare, bare.rpartition(":")[0], bare.rstrip(":"))}
    sent = [(name, value) for name, value in (("Host", host), ("Origin", origin)) if value]
    own = ({"localhost", "127.0.0.1", "::1"}, None, {"gw.example"})
    for hosts, names in zip(HOST_CHECKS, own, strict=True):
        try:
            hosts.check(CIMultiDict(sent))
        except Forbidden:
            continue
        assert names is None or readings & names, "a foreign host passed"
    try:
        check_admin(host or None, Config(routes=()))
    except Forbidden:
        return


def bearer_token(data: bytes) -> None:
    """A letter, then an `Authorization` value (`a`), signed claims (`c`) or a JWKS (`k`): only BadToken, ValueError.

    Only claims that another parser reads the same are verified.
    """
    kind, rest = data[:1], data[1:]
    if kind == b"k":
        try:
            assert read_keys(rest)
        except ValueError:
            return
    elif kind == b"c":
        token = _signed(rest)
        _ = principal.of_authorization(f"Bearer {token}")
        claims = _verified(token)
        assert claims is None or json.loads(rest)["iss"] == ISSUER, "a token of another issuer passed"
    else:
        value = rest.decode(errors="surrogateescape")
        assert len(principal.of_authorization(value)) == 32
        assert len(principal.of_authorization(value, is_checked=False)) == 32
        assert len(principal.of_headers(["x-key"], {"x-key": value}.get)) == 32
        assert _verified(value.removeprefix("Bearer ")) is None, "a token passed that nobody signed"


def _signed(payload: bytes) -> str:
    return jwt.PyJWS().encode(payload, SIGNING_KEY, "EdDSA", headers={"kid": "k1"})


def _verified(token: str) -> Any:
    try:
        return verify(token, KEYS, ISSUER, ())
    except BadToken:
        return None


def mirror_token(data: bytes) -> None:
    """A kind of tokens, then edits of a genuine one (upper case), or a content: only InvalidState and NoSession.

    The kinds are session ids (`s`), ids of nested requests (`n`), states (`r`) and ids of events (`e`). A token that
    was edited never opens, and none opens as another kind, or in another session.
    """
    letter, rest = data[:1].decode("latin-1"), data[1:]
    kind = letter.lower() if letter.lower() in _RINGS else "s"
    if letter.isupper():
        token = edited(_MIRRORED[kind].encode(), rest).decode("latin-1")
        assert _opening(token) == ({kind} if token == _MIRRORED[kind] else set()), "an edited token opened"
    else:
        assert _opening(_RINGS[kind].seal(rest)) <= {kind}, "a token opened as another kind"


def _opening(token: str) -> set[str]:
    """The kinds as which a token opens."""
    found = set()
    kinds: dict[str, tokens.Kind] = {"n": tokens.NESTED, "e": tokens.EVENT, "r": tokens.STATE}
    for name, kind in kinds.items():
        with suppress(InvalidState):
            _ = TOKENS.place(kind, token, "another session")
            raise AssertionError("a token of another session opened")
        with suppress(InvalidState):
            _ = TOKENS.place(kind, token, SESSION.key)
            found.add(name)
    with suppress(NoSession):
        _ = TOKENS.session(token, BEARER, 600.0)
        found.add("s")
    return found
