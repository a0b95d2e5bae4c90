"""Targets in `gateway/protocol/`: requests, JSON-RPC messages, event streams, lines, annotated parameters."""

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from msgspec import Raw
from multidict import CIMultiDict

from gateway.protocol import (
    era,
    header_mismatch,
    jsonrpc,
    mcp,
    param_headers,
    request,
    sse,
    stdio_framing,
    tool_list,
)
from gateway.protocol.canonical_json import canonical
from gateway.protocol.errors import DownstreamError, HeaderMismatch, InvalidParams
from gateway.protocol.json_text.json_bounds import MAX_DEPTH, check_bounds
from gateway.seal.claims import Bearer
from gateway.seal.request_state import bind, digest_answers
from tests.property.test_sse_split import outcome

DEPTH = MAX_DEPTH
BOUND = 4096
EVENTS = 1 << 20
OPENED = {"_meta", "inputResponses", "requestState", "task"}


def headers_of(head: bytes) -> header_mismatch.HeaderValues:
    """Headers of lines `Name: value`, decoded as aiohttp decodes them."""
    pairs = [line.partition(":")[::2] for line in head.decode(errors="surrogateescape").split("\n")]
    return CIMultiDict([(name, value.strip()) for name, value in pairs])


def strictly(data: bytes) -> Any:
    """Read JSON with another parser, numbers as text, and U+FFFD for unpaired surrogates."""
    found = json.loads(data.decode(), parse_int=str, parse_float=str, parse_constant=_refuse)
    if b"\\u" not in data:
        return found
    written = json.dumps(found, ensure_ascii=False)
    return json.loads(written.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def read_again(data: bytes) -> Any:
    """Read what the gateway accepted or wrote with another parser, which must accept it too."""
    try:
        return strictly(data)
    except ValueError as exc:
        raise AssertionError("it passed, and is not JSON") from exc


def _refuse(word: str) -> str:
    raise ValueError(f"{word} is not JSON")


BEARER = Bearer("/mcp", b"p" * 32, 0.0, lambda _: b"")


def read_request(data: bytes) -> None:
    """Header lines, an empty line, a body: only DownstreamError; what is accepted is what another parser reads."""
    head, _, body = data.partition(b"\n\n")
    headers = headers_of(head)
    try:
        posted = request.read(body)
    except DownstreamError:
        return
    said = read_again(body)
    assert said["method"] == posted.method, "another parser reads another method"
    assert sorted(said.get("params", {})) == sorted(posted.params), "another parser reads other params"
    _ = era.is_modern("POST", headers.get(mcp.PROTOCOL_VERSION), body, lambda: posted)
    if posted.id is None:
        return
    try:
        checked = request.check(posted, headers)
        _ = bind(BEARER, checked, ())
        _ = digest_answers(checked.input_responses or {})
    except DownstreamError:
        return
    sent = jsonrpc.request(bytes(checked.id), checked.method, {**checked.params, "_meta": checked.said.user_meta})
    again = read_again(sent)
    assert again["id"] == said["id"], "the id changed"
    want = {key: value for key, value in said["params"].items() if key not in OPENED}
    again["params"].pop("_meta")
    assert again["params"] == want, "the params that go upstream changed"


def event_stream(data: bytes) -> None:
    """A cut, then a stream: only EventTooLarge; a stream cut at that byte gives the same events as the whole."""
    cut, stream = int.from_bytes(data[:2]), data[2:]
    whole = outcome([stream], BOUND)
    if whole[2]:
        assert outcome([stream[:cut], stream[cut:]], EVENTS) == outcome([stream], EVENTS), "a cut changed the events"
    assert outcome([stream[at : at + 1] for at in range(min(len(stream), 200))]) == outcome([stream[:200]])
    try:
        message = b" ".join(stream.split())
        _ = jsonrpc.message(message)
    except ValueError:
        return
    assert [event.data for event in sse.Parser(EVENTS).feed(sse.encode(message))] == [message], "encode is not read"


def json_rpc(data: bytes) -> None:
    """One message: only ValueError; whatever opens is JSON, and a message put together again has the same value."""
    _check_depth(data)
    try:
        message = jsonrpc.message(data)
    except ValueError:
        return
    said = _lenient(data)
    if isinstance(message.id, Raw):
        _ = jsonrpc.is_id(message.id)
    if isinstance(message.error, Raw):
        error = jsonrpc.error(message.error)
        _ = json.loads(jsonrpc.failure(b"1", error))
    opened = jsonrpc.fields(data)
    if said is not None:
        assert _lenient(jsonrpc.merge(opened)) == said, "an object put together again differs"
    for raw in opened.values():
        _one_value(raw)


def _lenient(data: bytes) -> Any:
    try:
        return read_again(data)
    except RecursionError:
        return None


def _one_value(raw: Raw) -> None:
    text = jsonrpc.text(raw)
    if text is not None:
        assert jsonrpc.text(Raw(jsonrpc.encode(text))) == text, "a text does not survive encoding"
    for read in (jsonrpc.fields, jsonrpc.items, jsonrpc.distinct):
        with suppress(ValueError):
            _ = read(raw)
    try:
        value = jsonrpc.value(raw)
        again = jsonrpc.value(Raw(jsonrpc.encode(value)))
        assert canonical(again) == canonical(value), "a value does not survive encoding"
    except (ValueError, RecursionError):
        return


def _check_depth(data: bytes) -> None:
    """The depth that brackets outside strings reach, counted the plain way, against `check_bounds`."""
    try:
        _ = strictly(data)
    except (ValueError, RecursionError):
        return  # the depth of what is not JSON does not matter
    depth = deepest = 0
    quoted = escaped = False
    for byte in data:
        if quoted:
            escaped, quoted = byte == 0x5C and not escaped, byte != 0x22 or escaped
        elif byte == 0x22:
            quoted = True
        elif byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    for bound in (deepest, deepest - 1):
        try:
            check_bounds(data, bound)
            is_within = True
        except ValueError:
            is_within = False
        assert is_within is (deepest <= bound), "another depth"


def stdio_lines(data: bytes) -> None:
    """A cut, then bytes: a cut changes no line; one message is one line."""
    cut, stream = int.from_bytes(data[:2]), data[2:]
    whole = list(_lines([stream]))
    assert list(_lines([stream[:cut], stream[cut:]])) == whole, "a cut changed the lines"
    for line in filter(None, whole):
        assert b"\n" not in line
        assert len(line) <= BOUND
    if whole and whole[0] is not None and _is_message(whole[0]):
        assert list(_lines([stdio_framing.one_line(whole[0])])) == [whole[0].replace(b"\r", b" ")]


def _lines(chunks: list[bytes]) -> Iterator[bytes | None]:
    lines = stdio_framing.Lines(BOUND)
    for chunk in chunks:
        yield from lines.feed(chunk)


def _is_message(line: bytes) -> bool:
    try:
        _ = jsonrpc.message(line)
    except ValueError:
        return False
    return True


def tool_parameters(data: bytes) -> None:
    """Headers, a tool list, arguments: only the documented errors; a list that was filtered is not filtered again."""
    head, _, rest = data.partition(b"\n\n")
    listed, _, arguments = rest.partition(b"\n\n")
    try:
        _ = jsonrpc.fields(listed)
    except ValueError:
        return
    found = tool_list.read(Raw(listed))
    assert tool_list.read(found.result) == found._replace(left_out=()), "the filter left a tool that it removes"
    tools = found.tools or {}
    given = Raw(arguments) if arguments and _is_message(arguments) else None
    for tool in tools.values():
        try:
            param_headers.check(tool.mirrored, given, headers_of(head))
        except (HeaderMismatch, InvalidParams):
            continue
