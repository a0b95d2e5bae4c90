"""What one client has not read: it counts, and it has a deadline."""

import asyncio
from typing import Any, cast

import pytest

from gateway.config import InForce, Limits, Timeouts
from gateway.http.server.traffic import Traffic
from gateway.http.server.wire import PIECE_BYTES, Wire
from gateway.telemetry import Metrics
from tests.support.noted_timers import Timers
from tests.support.workbench import eventually, later


class FakeTransport:
    """A transport over which the test decides how much waits in it."""

    def __init__(self) -> None:
        self.waiting = 0
        self.written = b""
        self.aborted = False

    def get_extra_info(self, _: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return self.aborted

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True


class Client:
    """One client, and the budget of all."""

    def __init__(self, send_seconds: float = 30, sending_bytes: int = 100) -> None:
        timeouts = InForce(Timeouts(send_seconds=send_seconds))
        self.traffic = Traffic(InForce(Limits(sending_bytes=sending_bytes, event_bytes=1)), timeouts, Metrics("1"))
        self.out = FakeTransport()
        self.wire = Wire(cast("Any", self.out), self.traffic.sending, timeouts)

    async def sends(self, data: bytes, *, in_chunks: bool = False) -> asyncio.Task[None]:
        """Begin to send, until what is sent waits for the client."""
        task = later(self.wire.send(data, in_chunks=in_chunks))
        await asyncio.sleep(0)
        return task

    @property
    def used(self) -> int:
        return self.traffic.sending.used


async def test_what_waits_in_the_transport_counts_until_the_client_has_read_it() -> None:
    client = Client()
    client.out.waiting = 40
    client.wire.fell_behind()
    assert client.used == 40
    client.out.waiting = 0
    client.wire.caught_up()
    assert client.used == 0


async def test_what_is_not_written_yet_counts_too() -> None:
    client = Client(sending_bytes=PIECE_BYTES)
    client.out.waiting = 40
    client.wire.fell_behind()
    task = await client.sends(b"x" * (PIECE_BYTES + 10))
    assert (client.used, client.out.written) == (40, b""), "nothing is written while the client is behind"
    client.wire.caught_up()
    client.out.write = lambda data: client.wire.fell_behind()  # type: ignore[method-assign]
    await eventually(lambda: client.used == 50)
    client.out.waiting = 0
    client.wire.caught_up()
    await eventually(lambda: client.wire.is_behind, "the rest is written")
    client.wire.caught_up()
    await task
    assert client.used == 0


@pytest.mark.parametrize("size", [0, 3, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES + 5])
async def test_a_large_part_goes_out_in_pieces(size: int) -> None:
    client = Client(sending_bytes=2 * PIECE_BYTES + 5)
    await client.wire.send(b"x" * size)
    assert (client.out.written, client.used) == (b"x" * size, 0)
    client.out.written = b""
    await client.wire.send(b"x" * size, in_chunks=True)
    whole, rest = divmod(size, PIECE_BYTES)
    pieces = [PIECE_BYTES] * whole + [rest] * bool(rest)
    assert client.out.written == b"".join(b"%x\r\n%b\r\n" % (each, b"x" * each) for each in pieces)


async def test_a_client_that_is_behind_too_far_is_cut_off() -> None:
    client = Client()
    client.out.waiting = 101
    client.wire.fell_behind()
    assert client.out.aborted


async def test_a_lost_connection_counts_nothing_any_more() -> None:
    client = Client()
    client.out.waiting = 50
    client.wire.fell_behind()
    task = await client.sends(b"x")
    client.wire.lost()
    assert client.used == 0
    with pytest.raises(ConnectionResetError):
        await task
    client.wire.fell_behind()
    assert client.used == 0


async def test_a_client_that_does_not_read_in_time_is_cut_off(timers: Timers) -> None:
    client = Client(send_seconds=0.001)
    client.wire.fell_behind()
    await eventually(lambda: client.out.aborted)
    client = Client(send_seconds=77)
    client.wire.fell_behind()
    client.wire.caught_up()
    client.wire.caught_up()
    client.wire.fell_behind()
    client.wire.lost()
    assert [timer.cancelled() for timer in timers.of(77)] == [True, True]


async def test_bytes_in_the_transport_have_not_reached_the_kernel() -> None:
    client = Client()
    assert not client.wire.is_writing
    client.out.waiting = 1
    assert client.wire.is_writing
