"""The queue between a subscription and its client: what a slow client hears later."""

from msgspec import Raw

from gateway.bridge.change_queue import ChangeQueue
from gateway.exchange.events import Leg
from gateway.runtime.coarse_timer import CoarseTimer
from gateway.runtime.tasks import Tasks
from gateway.telemetry import Metrics


async def test_a_subscriber_that_does_not_read_hears_later_that_things_changed_and_not_how() -> None:
    out = ChangeQueue(Leg(Raw(b"1")), CoarseTimer(5, Tasks(Metrics("0")), "silence"), 10)
    out.tell(("a", ""), b"a" * 6)
    assert not out.has_room(("b", ""), b"b" * 6)
    out.tell(("b", ""), b"b")
    assert out.has_room(("a", ""), b"a" * 9)
    assert [await out.take(), await out.take()] == [b"a" * 6, b"b"]
    assert out.has_room(("b", ""), b"b" * 10)
