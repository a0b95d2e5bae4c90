"""What one client has not read: it counts, and it has a deadline."""

from typing import Any, cast

import pytest

from gateway.config import InForce, Limits, Timeouts
from gateway.http.server.traffic import Traffic
from gateway.http.server.unread import Unread
from gateway.telemetry import Metrics
from tests.support.noted_timers import Timers
from tests.support.workbench import eventually


class FakeTransport:
    """A transport over which the test decides how much waits in it."""

    def __init__(self) -> None:
        self.waiting = 0
        self.asked = 0
        self.aborted = False

    def get_extra_info(self, _: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        self.asked += 1
        return self.waiting

    def abort(self) -> None:
        self.aborted = True


class Client:
    """One client, and the budget of all."""

    def __init__(self, send_seconds: float = 30) -> None:
        timeouts = InForce(Timeouts(send_seconds=send_seconds))
        self.traffic = Traffic(InForce(Limits(sending_bytes=100, event_bytes=1)), timeouts, Metrics("1"))
        self.out = FakeTransport()
        self.unread = Unread(cast("Any", self.out), self.traffic.sending, timeouts)

    @property
    def used(self) -> int:
        return self.traffic.sending.used


@pytest.mark.parametrize(("is_behind", "used"), [(True, 50), (False, 10)])
async def test_what_waits_counts_while_the_client_is_behind(*, is_behind: bool, used: int) -> None:
    client = Client()
    client.out.waiting, client.unread.unsent = 40, 10
    client.unread.count(is_behind=is_behind)
    assert (client.used, len(client.traffic.sending)) == (used, 1)
    client.out.waiting = client.unread.unsent = 0
    client.unread.count(is_behind=is_behind)
    assert (client.used, len(client.traffic.sending)) == (0, 0)


async def test_a_client_that_is_behind_too_far_is_cut_off() -> None:
    client = Client()
    client.unread.unsent = 101
    client.unread.count(is_behind=False)
    assert client.out.aborted


async def test_a_lost_connection_counts_nothing_any_more() -> None:
    client = Client()
    client.unread.unsent = 50
    client.unread.count(is_behind=False)
    client.unread.close()
    assert client.used == 0
    client.unread.count(is_behind=False)
    assert client.used == 0


async def test_a_client_that_reads_nothing_is_cut_off_and_one_that_reads_slowly_is_not() -> None:
    client = Client(send_seconds=0.001)
    client.out.waiting = 40
    client.unread.watch()
    client.out.waiting = 30
    await eventually(lambda: client.out.aborted)
    assert client.out.asked > 3, "it had read something, so the time began again"


async def test_a_client_that_caught_up_has_no_deadline(timers: Timers) -> None:
    client = Client(send_seconds=77)
    client.unread.watch()
    client.unread.caught_up()
    client.unread.caught_up()
    assert [timer.cancelled() for timer in timers.of(77)] == [True]


async def test_bytes_in_the_transport_have_not_reached_the_kernel() -> None:
    client = Client()
    assert not client.unread.is_in_process
    client.out.waiting = 1
    assert client.unread.is_in_process
