"""Mutates bytes at random from a seed: the same seed gives the same mutants on every machine."""

import json
from collections.abc import Sequence
from random import Random
from typing import Any

TOKENS: tuple[bytes, ...] = (
    b"\r",
    b"\n",
    b"\r\n",
    b"\r\n\r\n",
    b"\n\n",
    b"\0",
    b"\x1b[0m",
    b"\x7f",
    b"\x80",
    b"\xff",
    b"\xc3\xa9",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"\xe2\x80\xa8",
    b"\\u0000",
    b"\\ud800",
    b"\\udfff",
    b"\\\\",
    b'\\"',
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b"[[[[[[[[[[[[[[[[",
    b"]]]]]]]]]]]]]]]]",
    b'{"a":{"a":{"a":{"a":',
    b":",
    b",",
    b"=",
    b";",
    b"@",
    b"[]",
    b"[::1]",
    b"%00",
    b"%0d%0a",
    b"..",
    b"//",
    b"null",
    b"true",
    b"NaN",
    b"-0",
    b"1e309",
    b"1e999999",
    b"-1",
    b"0",
    b"2147483648",
    b"9007199254740993",
    b"18446744073709551616",
    b"9" * 400,
    b'"2.0"',
    b'"id":',
    b'"method":',
    b'"params":',
    b'"result":',
    b'"error":',
    b'"_meta":',
    b"data:",
    b"id:",
    b"event:",
    b"retry:",
    b"tools/call",
    b"resources/read",
    b"notifications/cancelled",
    b"io.modelcontextprotocol/protocolVersion",
    b"2026-07-28",
    b"2025-11-25",
    b"HTTP/1.1",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    b"Content-Length: ",
    b"Transfer-Encoding: chunked\r\n",
    b"Content-Encoding: gzip\r\n",
    b"Mcp-Session-Id: ",
    b"=?base64?",
    b"?=",
)
"""Words of the formats, and bytes that parsers treat differently from one another."""

ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**63,
    1e308,
    "",
    "\0",
    "\ud800",
    "\r\nx: y",
    "\u2028",
    "x" * 300,
    [],
    {},
    [[]],
    {"": {}},
)


class Mutator:
    """Draws mutants of inputs; `others` are further inputs to take pieces from."""

    def __init__(self, seed: int, others: Sequence[bytes] = (), max_bytes: int = 65_536) -> None:
        self.random = Random(seed)
        self._others = list(others)
        self._max = max_bytes
        self._edits = (
            self._flip,
            self._overwrite,
            self._insert,
            self._insert,
            self._replace,
            self._replace,
            self._delete,
            self._repeat,
            self._move,
            self._truncate,
            self._splice,
        )

    def mutate(self, data: bytes) -> bytes:
        """A mutant of `data`, which may by chance be equal to it."""
        for _ in range(self.random.choice((1, 1, 2, 3, 6))):
            data = self.random.choice(self._edits)(data)[: self._max]
        return data

    def mutate_json(self, data: bytes) -> bytes:
        """A mutant that is JSON as well; a mutant of the bytes if `data` is not JSON."""
        try:
            tree = json.loads(data)
        except (ValueError, RecursionError):
            return self.mutate(data)
        for _ in range(self.random.choice((1, 1, 2))):
            tree = self._in_tree(tree)
        return json.dumps(tree).encode()

    def _in_tree(self, node: Any) -> Any:
        """The tree with one value replaced, removed, renamed or moved to another place."""
        inner = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
        if not inner or self.random.random() < 0.15:
            return self.random.choice((*ODD_VALUES, [node], {"a": node}))
        at = self.random.choice(inner)
        changed = dict(node) if isinstance(node, dict) else list(node)
        what = self.random.random()
        if what < 0.15:
            del changed[at]
        elif what < 0.25 and isinstance(changed, dict):
            changed[self.random.choice(("", "\ud800", "_meta", "id", "method", f"{at}x"))] = changed.pop(at)
        elif what < 0.35 and isinstance(changed, list):
            changed += changed[at : at + 1] * self.random.choice((1, 2, 100))
        else:
            changed[at] = self._in_tree(changed[at])
        return changed

    def _span(self, data: bytes, most: int = 64) -> tuple[int, int]:
        begin = self.random.randint(0, len(data))
        return begin, min(len(data), begin + self.random.randint(1, most))

    def _flip(self, data: bytes) -> bytes:
        if not data:
            return b"\0"
        at = self.random.randrange(len(data))
        return data[:at] + bytes([data[at] ^ (1 << self.random.randrange(8))]) + data[at + 1 :]

    def _overwrite(self, data: bytes) -> bytes:
        begin, end = self._span(data, 4)
        return data[:begin] + self.random.randbytes(end - begin) + data[end:]

    def _insert(self, data: bytes) -> bytes:
        at = self.random.randint(0, len(data))
        return data[:at] + self.random.choice(TOKENS) + data[at:]

    def _replace(self, data: bytes) -> bytes:
        begin, end = self._span(data, 16)
        return data[:begin] + self.random.choice(TOKENS) + data[end:]

    def _delete(self, data: bytes) -> bytes:
        begin, end = self._span(data)
        return data[:begin] + data[end:]

    def _repeat(self, data: bytes) -> bytes:
        begin, end = self._span(data)
        return data[:end] + data[begin:end] * self.random.choice((1, 2, 7, 200)) + data[end:]

    def _move(self, data: bytes) -> bytes:
        begin, end = self._span(data)
        rest = data[:begin] + data[end:]
        at = self.random.randint(0, len(rest))
        return rest[:at] + data[begin:end] + rest[at:]

    def _truncate(self, data: bytes) -> bytes:
        return data[: self.random.randint(0, len(data))]

    def _splice(self, data: bytes) -> bytes:
        if not self._others:
            return self._move(data)
        other = self.random.choice(self._others)
        return data[: self.random.randint(0, len(data))] + other[self.random.randint(0, len(other)) :]
