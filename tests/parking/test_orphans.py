"""What is done about calls that no process reads."""

from unittest.mock import AsyncMock, Mock

from gateway.parking.orphans import Remains, end, must_not_be_cancelled
from gateway.protocol.errors import Unreachable
from gateway.seal.request_state import Whereabouts
from tests.support.logs import Lines


def test_the_task_ids_of_the_python_sdk_forbid_a_cancellation() -> None:
    assert must_not_be_cancelled("63133a589d9b4531a0a872529ca27d4b:dc71a5c1-3d08-43bc-987c-4c9632ada55d")
    assert not must_not_be_cancelled("63133a589d9b4531a0a872529ca27d4b")
    assert not must_not_be_cancelled("dc71a5c1-3d08-43bc-987c-4c9632ada55d")


async def test_a_call_that_cannot_be_cancelled_is_logged_with_its_exchange(log_lines: Lines) -> None:
    channel = Mock(send=AsyncMock(side_effect=Unreachable("it is gone")), close=AsyncMock())
    live = Mock()
    live.route.path, live.upstream.pool.adopted_channel.return_value = "/mcp", channel
    live.upstream.pool.config.timeouts.cancel_seconds = 1
    remains = Remains(Whereabouts("s", "2025-11-25", b"1", b"", None), ())
    assert not await end(live, "x1", remains, "the client is gone", {})
    (line,) = log_lines("upstream.failed")
    assert (line["cause"], line["exchange_id"]) == ("it is gone", "x1")
