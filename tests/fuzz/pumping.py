"""Searches the passes over hostile text for input whose cost grows faster than its length.

    python -m tests.fuzz.pumping 60 [PASS...]

An input is pumped: a piece of a seed, or a word of the formats, is repeated until the input has one length and then
eight times that length. A linear pass takes eight times as long. What takes far more, or far more than the goal of
100 ms per MiB, is measured again, and reported if the smallest of several measurements says the same.

It measures CPU time of one thread, so it is a search by hand or by `make fuzz`, and never a test.
"""

import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from random import Random, SystemRandom
from typing import Any, Final, NamedTuple

from msgspec import Raw

from gateway.config import parse
from gateway.exchange import input_requests, results
from gateway.identity import principal
from gateway.identity.jwt_verification import verify
from gateway.plugins.oauth import oauth_metadata
from gateway.protocol import (
    header_mismatch,
    jsonrpc,
    mcp,
    request,
    sse,
    stdio_framing,
    tool_list,
)
from gateway.protocol.canonical_json import canonical_members
from gateway.protocol.json_text.json_bounds import check_bounds
from gateway.protocol.json_text.unpaired_surrogates import well_formed
from tests.fuzz.content_targets import ALL, SERVER
from tests.fuzz.mutator import TOKENS
from tests.fuzz.protocol_targets import DEPTH
from tests.fuzz.targets import TARGETS
from tests.fuzz.trust_targets import HOST_CHECKS, ISSUER, KEYS, SEALER

GROWTH: Final = 8
FAR_MORE: Final = 2.5
"""A pass is superlinear if its time grows by this factor more than the input. A quadratic pass grows by 8 more."""
NOTABLE_SECONDS: Final = 0.02
"""What takes less on the long input is not measured again."""
GOAL_SECONDS_PER_MIB: Final = 0.1
LEAST_SECONDS: Final = 2e-4
"""Shorter times are noise, or the constant part of a pass."""
TIMES: Final = 3
TO_THE_END: Final = 0.1
"""The part of the shapes that are tried at full length; the others cost a hundredth of that."""
MIB: Final = 1 << 20


class Pass(NamedTuple):
    """One pass over hostile text, the target whose seeds it is fed, and the longest text that can reach it."""

    run: Callable[[bytes], Any]
    seeds: str
    longest: int = MIB


def _text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


def _error(data: bytes) -> Any:
    error = jsonrpc.Error(0, data.decode(errors="replace"))
    return [results.modern_error(method, "file:///a", error) for method in (mcp.RESOURCES_READ, mcp.PROMPTS_GET)]


def _metadata(data: bytes) -> Any:
    return oauth_metadata.challenge(_text(data), oauth_metadata.Place("https://g", "/mcp", "http://u:1"))


def _checked(data: bytes) -> Any:
    head, _, body = data.partition(b"\n\n")
    return request.read(body or head)


PASSES: Final = {
    "request.read": Pass(_checked, "request"),
    "header_mismatch.decode_value": Pass(
        lambda data: header_mismatch.decode_value("n", f"=?base64?{_text(data)}?="), "host", 65_536
    ),
    "jsonrpc.message": Pass(jsonrpc.message, "jsonrpc"),
    "jsonrpc.fields": Pass(jsonrpc.fields, "jsonrpc"),
    "jsonrpc.distinct": Pass(jsonrpc.distinct, "jsonrpc"),
    "jsonrpc.value": Pass(jsonrpc.value, "jsonrpc"),
    "canonical_members": Pass(lambda data: canonical_members({"a": Raw(data)}), "jsonrpc"),
    "check_bounds": Pass(lambda data: check_bounds(data, DEPTH), "jsonrpc"),
    "jsonrpc.text": Pass(lambda data: jsonrpc.text(Raw(b'"' + data + b'"')), "jsonrpc"),
    "jsonrpc.error": Pass(lambda data: jsonrpc.error(Raw(data)), "result"),
    "jsonrpc.is_id": Pass(lambda data: jsonrpc.is_id(Raw(data)), "jsonrpc"),
    "well_formed": Pass(well_formed, "jsonrpc"),
    "sse.Parser": Pass(lambda data: sse.Parser(16 * MIB).feed(data), "sse"),
    "sse.Parser, in pieces": Pass(lambda data: _in_pieces(sse.Parser(16 * MIB).feed, data), "sse"),
    "sse.encode": Pass(sse.encode, "jsonrpc"),
    "stdio.Lines": Pass(lambda data: list(stdio_framing.Lines(16 * MIB).feed(data)), "stdio"),
    "stdio.Lines, in pieces": Pass(lambda data: _lines_in_pieces(data), "stdio"),  # noqa: PLW0108  (defined below)
    "results.modern": Pass(
        lambda data: results.modern(mcp.TOOLS_CALL, Raw(data), SERVER, (0, "private"), retried=False), "result"
    ),
    "results.modern, a list": Pass(
        lambda data: results.modern(mcp.TOOLS_LIST, Raw(data), SERVER, (0, "private"), retried=False), "result"
    ),
    "results.modern_error": Pass(_error, "result"),
    "results.error_data": Pass(lambda data: results.error_data(Raw(data), {"uri": "a"}), "result"),
    "input_requests.read": Pass(lambda data: input_requests.read(mcp.ELICIT, Raw(data), ALL), "question"),
    "input_requests.read, sampling": Pass(lambda data: input_requests.read(mcp.SAMPLE, Raw(data), ALL), "question"),
    "input_requests.url_questions": Pass(lambda data: input_requests.url_questions(Raw(data), ()), "question"),
    "tool_list.read": Pass(lambda data: tool_list.read(Raw(data)), "result"),
    "request_state.open": Pass(lambda data: SEALER.open(_text(data)), "state", 65_536),
    "host_check.check": Pass(lambda data: HOST_CHECKS[1].check(_text(data), _text(data)), "host", 8_190),
    "principal.of_authorization": Pass(lambda data: principal.of_authorization(_text(data)), "token", 8_190),
    "bearer_token.verify": Pass(lambda data: verify(_text(data), KEYS, ISSUER, ()), "token", 65_536),
    "oauth_metadata.challenge": Pass(_metadata, "host", 8_190),
    "config.parse": Pass(
        lambda data: parse(data.decode(errors="replace"), "/nonexistent/x.yaml", {}), "config", 262_144
    ),
}


def _in_pieces(feed: Callable[[bytes], Any], data: bytes) -> None:
    for at in range(0, len(data), 1024):
        _ = feed(data[at : at + 1024])


def _lines_in_pieces(data: bytes) -> None:
    lines = stdio_framing.Lines(16 * MIB)
    _in_pieces(lambda piece: list(lines.feed(piece)), data)


class Shape(NamedTuple):
    """How an input is pumped: a head, a piece that is repeated, a middle, a piece that closes each, a tail."""

    head: bytes
    piece: bytes
    middle: bytes
    closing: bytes
    tail: bytes

    def of(self, length: int) -> bytes:
        """The input of about this length."""
        rest = length - len(self.head) - len(self.middle) - len(self.tail)
        times = max(1, rest // (len(self.piece) + len(self.closing)))
        return self.head + self.piece * times + self.middle + self.closing * times + self.tail


WORD: Final = re.compile(rb"[A-Za-z]+")
NESTED: Final = ((b"[", b"]"), (b'{"a":', b"}"), (b'{"properties":{"a":', b"}}"), (b'[{"content":', b"}]"))


def draw(random: Random, seeds: Sequence[bytes]) -> Shape:
    """A shape: a place in a seed, and what is repeated there."""
    seed = random.choice(seeds)
    begin = random.randint(0, len(seed))
    end = min(len(seed), begin + random.choice((0, 1, 2, 4, 16, 64)))
    what = random.random()
    if what < 0.4:
        piece, closing = random.choice(TOKENS), b""
    elif what < 0.5:
        piece, closing = random.choice(NESTED)
        return Shape(seed[:begin], piece, b"1", closing, seed[end:])
    elif what < 0.6:
        piece, closing = random.choice(TOKENS) + random.choice(TOKENS), b""
    elif what < 0.8:
        piece, closing = random.choice(WORD.findall(random.choice(seeds)) or [b"a"]), b""
    else:
        piece, closing = seed[begin:end] or bytes([random.randrange(256)]), b""
    if random.random() < 0.2:  # nothing but the piece
        return Shape(b"", piece, b"", closing, b"")
    return Shape(seed[:begin], piece, b"", closing, seed[end:])


def plain(random: Random, seeds: Sequence[bytes]) -> list[Shape]:
    """Every word of the seeds and of the formats, repeated alone, and every kind of nesting; in random order."""
    words = {word for seed in seeds for word in WORD.findall(seed)}
    shapes = [Shape(b"", piece, b"", b"", b"") for piece in sorted({*TOKENS, *words})]
    shapes += [Shape(b"", piece, b"1", closing, b"") for piece, closing in NESTED]
    random.shuffle(shapes)
    return shapes


def seconds(run: Callable[[bytes], Any], data: bytes) -> float:
    """The CPU time of one run."""
    begun = time.thread_time()
    with suppress(Exception):  # what a pass may raise is the business of the targets
        _ = run(data)
    return time.thread_time() - begun


def verdict(each: Pass, shape: Shape, lengths: Sequence[int]) -> str | None:
    """How the cost of a pass grows with this shape from length to length, if it grows too fast; else None.

    The lengths ascend, because a quadratic pass would take minutes for the longest text.
    """
    for fewer, length in pairwise(lengths):
        data = shape.of(length)
        if seconds(each.run, data) > NOTABLE_SECONDS:
            shorter = shape.of(fewer)
            few, many = (min(seconds(each.run, text) for _ in range(TIMES)) for text in (shorter, data))
            if many > NOTABLE_SECONDS and many / max(few, LEAST_SECONDS) > FAR_MORE * len(data) / len(shorter):
                return f"superlinear: {few * 1e3:.1f} ms for {len(shorter)} bytes, {many * 1e3:.1f} ms for {len(data)}"
            if (cost := many / (len(data) / MIB)) > GOAL_SECONDS_PER_MIB and length == each.longest:
                return f"slow: {cost * 1e3:.0f} ms per MiB ({many * 1e3:.1f} ms for {len(data)} bytes)"
    return None


def search(name: str, until: float, random: Random) -> tuple[int, dict[str, tuple[str, Shape]]]:
    """Pump one pass until then; how many shapes were tried, and the worst of each kind of finding."""
    each = PASSES[name]
    seeds = TARGETS[each.seeds].seeds()
    tried, worst, first = 0, dict[str, tuple[str, Shape]](), plain(random, seeds)
    lengths = [each.longest // GROWTH**3, each.longest // GROWTH**2, each.longest // GROWTH, each.longest]
    while time.monotonic() < until:
        if first:
            shape, upto = first.pop(), 4 if random.random() < TO_THE_END * 3 else 3
        else:
            shape, upto = draw(random, seeds), 4 if random.random() < TO_THE_END else 2
        said = verdict(each, shape, lengths[:upto])
        tried += 1
        if said is not None:
            _ = worst.setdefault(said.split(":")[0], (said, shape))
    return tried, worst


def main() -> int:
    """Share the seconds of the command line among the passes."""
    total = float(sys.argv[1]) if len(sys.argv) > 1 else 60
    names = sys.argv[2:] or list(PASSES)
    seed = SystemRandom().randrange(2**32)
    random, begun, shapes, findings = Random(seed), time.monotonic(), 0, 0
    for number, name in enumerate(names, 1):
        tried, worst = search(name, begun + total * number / len(names), random)
        shapes += tried
        for said, shape in worst.values():
            findings += said.startswith("superlinear")
            print(f"{name}: {said}; {_shown(shape)}", flush=True)
    print(f"{shapes} shapes of {len(names)} passes, begun with {seed}: {findings} superlinear", flush=True)
    return 1 if findings else 0


def _shown(shape: Shape) -> str:
    closed = f" closed by {shape.closing!r}" if shape.closing else ""
    return f"{shape.piece[:60]!r} repeated{closed} after {shape.head[-60:]!r}, before {shape.tail[:60]!r}"


if __name__ == "__main__":
    sys.exit(main())
