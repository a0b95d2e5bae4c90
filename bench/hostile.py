"""Messages that are expensive to read, as large as the gateway permits: how much time does each MiB take it?

The upstream or the client sends one such message at a time, and meanwhile GETs of /healthz follow each other. The CPU
time between two of their replies is how long the gateway's event loop did nothing else, however busy the machine is.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from bench import modern
from bench.http1 import Message
from bench.load import Connection, Wrong
from bench.processes import Process

MIB = 1 << 20
LARGEST_BODY = 4 * MIB
"""The default of limits.body_bytes."""
ENVELOPE = 4096
"""What a message needs beside its payload."""
LARGEST_REPLY = 16 * MIB - ENVELOPE
"""The default of limits.event_bytes."""
PAUSE_SECONDS = 0.005
IDLE_PINGS = 100
PING = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def filled(pattern: bytes, size: int, separator: bytes = b",") -> bytes:
    """`pattern` as often as it fits, with `{}` replaced by the number of each."""
    if b"{}" not in pattern:
        return separator.join([pattern] * (size // len(pattern + separator)))
    count = size // (len(pattern + separator) + 5)
    return separator.join(pattern.replace(b"{}", b"%07d" % number) for number in range(count))


CONTENT = b'{"content":[{"type":"text","text":"%b"}]}'
REPLIES: dict[str, Callable[[int], bytes]] = {
    "one long text": lambda size: CONTENT % (b"x" * size),
    "members": lambda size: b'{"content":[],"z":null,%b}' % filled(b'"k{}":1', size),
    "members of _meta": lambda size: b'{"content":[],"_meta":{%b}}' % filled(b'"k{}":1', size),
    "items with nulls": lambda size: b'{"content":[%b]}' % filled(b'{"type":"text","text":"","x":null}', size),
    "empty arrays": lambda size: b'{"content":[],"z":null,"structuredContent":{"a":[%b]}}' % filled(b"[]", size),
    "nested content": lambda size: (
        b'{"content":[' + b'{"content":' * 60 + b'{"a":"%b","b":null}' % (b"x" * size) + b"}" * 60 + b"]}"
    ),
    "unpaired surrogates": lambda size: CONTENT % filled(b"\\ud800", size, b""),
    "escapes": lambda size: CONTENT % filled(b"\\\\\\u0041", size, b""),
}
"""Results of a tool."""
STREAMS: dict[str, Callable[[int], bytes]] = {
    "LF": lambda size: b"\n" * size,
    "CR": lambda size: b"\r" * size,
    "comments": lambda size: filled(b":\n", size, b""),
    "empty data lines": lambda size: filled(b"data:\n", size, b"") + b"\n",
    "empty events": lambda size: filled(b"data:\n\n", size, b""),
    "ids": lambda size: filled(b"id:{}\n\n", size, b""),
    "notifications": lambda size: filled(
        b'data: {"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":"x"}}\n\n', size, b""
    ),
}
"""What comes on the call's stream before the result."""
ERRORS: dict[str, Callable[[int], bytes]] = {
    "text of an error": lambda size: b'{"code":0,"message":"%b"}' % filled(b"resource not foun ", size, b""),
    "urls of -32042": lambda size: (
        b'{"code":-32042,"message":"","data":{"elicitations":[%b]}}'
        % filled(b'{"mode":"url","message":"m","url":"http://x","elicitationId":"1"}', size)
    ),
    "members of an error": lambda size: b'{"code":-32042,"message":"","data":{%b}}' % filled(b'"k{}":1', size),
}
"""Errors of a tool, or of a resource."""
BODIES: dict[str, Callable[[int], bytes]] = {
    "one long argument": lambda size: b'"%b"' % (b"x" * size),
    "an array": lambda size: b"[%b]" % filled(b"12", size),
    "empty arrays": lambda size: b"[%b]" % filled(b"[]", size),
    "members": lambda size: b"{%b}" % filled(b'"k{}":1', size),
    "members with spaces": lambda size: b"{%b}" % filled(b'"k{}": 1', size, b", "),
    "brackets": lambda size: b"[" * (size // 2) + b"]" * (size // 2),
    "unpaired surrogates": lambda size: b'"%b"' % filled(b"\\ud800", size, b""),
    "floats": lambda size: b"[%b]" % filled(b"1.{}e-300", size),
    "escapes": lambda size: b'"%b"' % filled(b"\\\\", size, b""),
}
"""The argument of a call."""


def reply(name: str, size: int, call_id: bytes) -> tuple[bytes, bool]:
    """What the upstream answers, and whether it is a stream; `name` is a key of one of the tables, after its kind."""
    kind, _, which = name.partition(": ")
    match kind:
        case "stream":
            result = b'data: {"jsonrpc":"2.0","id":%b,"result":%b}\n\n' % (call_id, CONTENT % b"done")
            return STREAMS[which](size) + b"\n\n" + result, True
        case "error":
            return b'{"jsonrpc":"2.0","id":%b,"error":%b}' % (call_id, ERRORS[which](size)), False
        case _:
            return b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (call_id, REPLIES[which](size)), False


@dataclass(frozen=True, slots=True)
class Cost:
    """What one message cost."""

    name: str
    size: int
    cpu_ms: float
    held_ms: float
    """The longest CPU time in which the gateway answered nothing else."""
    peak_mib: float
    """The largest resident memory, over that before the message."""
    said: str

    @property
    def ms_per_mib(self) -> float:
        return self.cpu_ms / (self.size / MIB)


@dataclass(slots=True)
class HostileOutcome:
    """The costs of all messages, and what was wrong."""

    costs: list[Cost] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Watcher:
    """Pings the gateway all the time."""

    def __init__(self, gateway: Process) -> None:
        self._gateway = gateway
        self._connection = Connection(gateway.admin)
        self.pings = 0
        self.longest = 0.0
        """The most CPU seconds between two replies."""

    async def watch(self) -> None:
        before = self._gateway.cpu_seconds()
        while True:
            await self._connection.request(PING)
            now = self._gateway.cpu_seconds()
            self.longest = max(self.longest, now - before)
            before = now
            self.pings += 1
            await asyncio.sleep(PAUSE_SECONDS)

    def close(self) -> None:
        self._connection.close()


async def seconds_of_a_ping(gateway: Process) -> float:
    """The CPU time of one ping of an idle gateway."""
    connection = Connection(gateway.admin)
    before = gateway.cpu_seconds()
    for _ in range(IDLE_PINGS):
        await connection.request(PING)
    connection.close()
    return (gateway.cpu_seconds() - before) / IDLE_PINGS


async def cost(gateway: Process, name: str, size: int, request: bytes, ping_seconds: float) -> Cost:
    """Send one request and wait for its reply, whatever it is."""
    gateway.forget_peak()
    idle_kib = gateway.rss_kib()
    connection, watcher = Connection(gateway.address), Watcher(gateway)
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watcher.watch())
        cpu = gateway.cpu_seconds()
        answered = await connection.request(request)
        cpu = gateway.cpu_seconds() - cpu - watcher.pings * ping_seconds
        before = watcher.pings
        while watcher.pings == before:  # the last hold ends with the next ping
            await asyncio.sleep(PAUSE_SECONDS)
        watching.cancel()
    connection.close()
    watcher.close()
    peak = (gateway.peak_kib() - idle_kib) / 1024
    return Cost(name, size, cpu * 1e3, watcher.longest * 1e3, peak, summary(answered))


def summary(answered: Message) -> str:
    """The end of a reply, in a few words."""
    body = answered.body
    if b'"message":"' in body[-600:] or b'"error":' in body[:600]:
        return f"HTTP {answered.status}, an error"
    return f"HTTP {answered.status}, {len(body):,} bytes"


async def hostile(gateway: Process, sizes: tuple[int, ...]) -> HostileOutcome:
    """Each message in each size that is permitted."""
    outcome = HostileOutcome()
    warm = Connection(gateway.address)
    for _ in range(20):
        await modern.echo("echo")(warm)
    warm.close()
    ping = await seconds_of_a_ping(gateway)
    names = [*(f"reply: {name}" for name in REPLIES), *(f"stream: {name}" for name in STREAMS)]
    names += [f"error: {name}" for name in ERRORS]
    for size in sizes:
        length = min(size, LARGEST_REPLY)
        for name in names:
            marker = f"{name}|{length}"
            is_resource = name == "error: text of an error"
            ask = modern.read_resource if is_resource else modern.call_hostile
            outcome.costs.append(await cost(gateway, name, length, ask(next(modern.ids), marker), ping))
        if size > LARGEST_BODY:
            continue
        for name, body in BODIES.items():
            request = modern.raw_call(next(modern.ids), "echo", body(size - ENVELOPE))
            outcome.costs.append(await cost(gateway, f"body: {name}", size, request, ping))
    try:
        await modern.echo("echo")(Connection(gateway.address))
    except (Wrong, OSError) as exc:
        outcome.wrong.append(f"an echo after all this: {exc}")
    return outcome
