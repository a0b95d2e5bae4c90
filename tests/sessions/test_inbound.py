"""What one message of the upstream means while a call is, or is not, in flight."""

from typing import Any
from unittest.mock import MagicMock, Mock

import msgspec
import pytest
from msgspec import Raw

from gateway.config import Config, InForce, Route, RouteSettings, Upstream
from gateway.exchange import events as on
from gateway.http_client.errors import ReplyCut
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CannotAsk
from gateway.runtime.tasks import Tasks
from gateway.sessions import inbound
from gateway.sessions.call import Call, OwnListener, PoolKey
from gateway.sessions.group import ChangeListeners, Group
from gateway.sessions.session import Session
from gateway.telemetry import Metrics, NestedOutcome
from gateway.telemetry.metrics.series import Count
from gateway.upstream.channel import Channel, Headers

ID = b'"gw-1"'
NOT_CALLED = "No call is in flight that could ask (SEP-2260)"
NAMELESS = "Several calls are in flight, and the request names none of them"


class Scene(OwnListener):
    """A session in which a call is in flight, and what a message brings about in it."""

    def __init__(self, *, has_token: bool = True, is_own: bool = False, can_ask: bool = True) -> None:
        super().__init__()
        self.found: list[tuple[str, Any]] = []
        self.channel = Mock(Channel, can_ask=can_ask, taken=False, send=self.send)
        metrics = Mock(Metrics, notification=self.count)
        metrics.upstream_failures = metrics.nested_requests = MagicMock()
        metrics.nested_requests.__getitem__.side_effect = self.counted
        group: Group[Session] = Group(PoolKey(b"p", b"{}", b"{}", ()), False, ChangeListeners(), Mock())
        self.tasks = Tasks(Mock(Metrics))
        route = Route(path="/mcp", upstream=Upstream(url="http://upstream/mcp"))
        settings = InForce(RouteSettings(Config(routes=(route,)), route))
        self.session = Session(group, self.channel, settings, metrics, self.tasks)
        self.session.watch(self)
        self.call = Call(ID, b"", self, b"7" if has_token else None, is_own=is_own)

    async def send(self, message: bytes, _: Headers) -> None:
        self.found.append(("answer", {**msgspec.json.decode(message), "jsonrpc": None}))

    def count(self, _: str, what: str, *more: object, **labels: object) -> None:
        self.found.append((what, more[0] if more else labels.get("forwarded")))

    def counted(self, labels: tuple[str, ...]) -> Mock:
        return Mock(Count, inc=lambda: self.count(*labels))

    def changed(self, method: str, data: bytes) -> None:
        self.found.append((method, "changed"))

    def hear(self, event: on.Event) -> None:
        fields = {name: getattr(event, name) for name in type(event).__struct_fields__}
        plain = {name: field for name, field in fields.items() if field is not msgspec.UNSET}
        said = plain if isinstance(event, on.Stopped) else msgspec.json.decode(msgspec.json.encode(plain))
        self.found.append((type(event).__name__, said))

    async def told(
        self, members: dict[str, Any], *, in_flight: bool = True, is_ambiguous: bool = False
    ) -> list[tuple[str, Any]]:
        self.session.in_flight = self.call if in_flight else None
        message, data = jsonrpc.message(msgspec.json.encode(members)), b"the message"
        self.session.hear_aside(message, data, is_ambiguous=is_ambiguous)
        await self.tasks.settle(1)
        return self.found


def refused(method: str, why: str) -> list[tuple[str, Any]]:
    error = {"code": mcp.INVALID_PARAMS, "message": why}
    return [(method, NestedOutcome.UNSOLICITED), ("answer", {"jsonrpc": None, "id": 3, "error": error})]


UNKNOWN: Any = [("unknown_id", None)]
PONG: Any = [("answer", {"jsonrpc": None, "id": 3, "result": {}})]


def unrelated(method: str) -> list[tuple[str, Any]]:
    return [(method, False)]


ELICIT = {"id": 3, "method": mcp.ELICIT, "params": {"message": "Name?"}}
NESTED: Any = [("Nested", ELICIT)]
PROGRESSED = {"params": {"progressToken": 7, "progress": 1}}
CALL = Call(ID, b"", OwnListener())


def message(**members: Any) -> jsonrpc.Message:
    return jsonrpc.message(msgspec.json.encode(members))


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"id": "gw-1", "result": {"a": 1}}, [("Resulted", {"result": {"a": 1}, "is_tool_error": None})]),
        (
            {"id": "gw-1", "error": {"code": -1, "message": "no"}},
            [("Failed", {"error": {"code": -1, "message": "no"}})],
        ),
        ({"id": "gw-2", "result": {}}, UNKNOWN),
        ({"id": 1, "result": {}}, UNKNOWN),
        ({"id": "gw-1"}, UNKNOWN),
        ({"result": {}}, UNKNOWN),
        ({"id": 3, "method": mcp.PING}, PONG),
        (ELICIT, NESTED),
        ({"id": 3, "method": "x/y"}, [("Nested", {"id": 3, "method": "x/y"})]),
        ({"method": mcp.TOOLS_CHANGED}, [(mcp.TOOLS_CHANGED, "changed")]),
        ({"method": mcp.PROGRESS, "params": {"progressToken": 7, "progress": 1}}, [("Progressed", PROGRESSED)]),
        ({"method": mcp.PROGRESS, "params": {"progressToken": "7"}}, unrelated(mcp.PROGRESS)),
        ({"method": mcp.PROGRESS, "params": {}}, unrelated(mcp.PROGRESS)),
        (
            {"method": mcp.LOG, "params": {"level": "info"}},
            [("Logged", {"level": "info", "params": {"level": "info"}})],
        ),
        ({"method": mcp.LOG, "params": {}}, [("Logged", {"level": "", "params": {}})]),
        ({"method": mcp.LOG}, unrelated(mcp.LOG)),
        ({"method": mcp.LOG, "params": [1]}, unrelated(mcp.LOG)),
        ({"method": mcp.CANCELLED, "params": {"requestId": 3}}, [("Withdrawn", {"id": 3, "replayable": False})]),
        ({"method": mcp.CANCELLED, "params": {}}, unrelated(mcp.CANCELLED)),
        ({"method": "notifications/other"}, unrelated("notifications/other")),
    ],
)
async def test_a_message_means(members: dict[str, Any], expected: list[tuple[str, Any]]) -> None:
    assert await Scene().told(members) == expected


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"id": "gw-1", "result": {}}, UNKNOWN),
        ({"id": 3, "method": mcp.PING}, PONG),
        (ELICIT, refused(mcp.ELICIT, NOT_CALLED)),
        *(({"method": method}, [(method, "changed")]) for method in sorted(inbound.CHANGES)),
        ({"method": mcp.PROGRESS, "params": {"progressToken": 7}}, unrelated(mcp.PROGRESS)),
    ],
)
async def test_a_message_means_while_no_call_is_in_flight(
    members: dict[str, Any], expected: list[tuple[str, Any]]
) -> None:
    assert await Scene().told(members, in_flight=False) == expected


async def test_no_client_could_answer_what_is_asked_in_a_request_of_the_gateways_own() -> None:
    assert await Scene(is_own=True).told(ELICIT) == refused(mcp.ELICIT, NOT_CALLED)
    (answer,) = await Scene(is_own=True).told({"id": "gw-1", "result": {}})
    assert answer[0] == "Resulted"


async def test_a_call_whose_client_wants_no_progress_hears_none() -> None:
    progress = {"method": mcp.PROGRESS, "params": {"progressToken": 7}}
    assert await Scene(has_token=False).told(progress) == unrelated(mcp.PROGRESS)


async def test_a_question_stops_the_call_where_no_answer_reaches_the_server() -> None:
    ((name, said),) = await Scene(can_ask=False).told(ELICIT)
    assert (name, type(said["error"])) == ("Stopped", CannotAsk)
    assert await Scene(can_ask=False).told({"id": 3, "method": "x/y"}) == [("Nested", {"id": 3, "method": "x/y"})]
    assert await Scene(can_ask=False).told({"id": 3, "method": mcp.PING}) == PONG


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        (ELICIT, refused(mcp.ELICIT, NAMELESS)),
        ({"id": 3, "method": mcp.PING}, PONG),
        ({"id": "gw-1", "result": {}}, [("Resulted", {"result": {}, "is_tool_error": None})]),
        ({"method": mcp.LOG, "params": {}}, [("Logged", {"level": "", "params": {}})]),
    ],
)
async def test_a_request_that_any_of_several_calls_may_own_belongs_to_none(
    members: dict[str, Any], expected: list[tuple[str, Any]]
) -> None:
    scene = Scene()
    assert await scene.told(members, is_ambiguous=True) == expected
    assert scene.session.shared.asked_aside == (members is ELICIT)
    assert (scene.call.heard > 0) != (members is ELICIT), "it does not show that this call is alive"


def test_only_a_response_with_the_id_of_the_call_answers_it() -> None:
    assert inbound.answers(message(id="gw-1", result={}), CALL)
    assert not inbound.answers(message(id="gw-1", result={}), None)
    assert not inbound.answers(message(id="gw-2", result={}), CALL)
    assert not inbound.answers(message(id="gw-1", method=mcp.PING), CALL)


def test_an_answer_keeps_the_bytes_of_the_result() -> None:
    found = inbound.answer(jsonrpc.message(b'{"id":"gw-1","result":{ "a" : 1.0 }}'), CALL)
    assert isinstance(found, on.Resulted)
    assert found.result == Raw(b'{ "a" : 1.0 }')


PLAIN = b'{"content":[{"type":"text","text":"a"}]}'
FAILED = b'{"content":[],"isError":true}'


@pytest.mark.parametrize(
    ("data", "result", "is_tool_error"),
    [
        (b'{"jsonrpc":"2.0","id":"gw-1","result":%b}' % PLAIN, PLAIN, False),
        (b'{"result":%b,"jsonrpc":"2.0","id":"gw-1"}' % FAILED, FAILED, True),
        (b'{"jsonrpc":"2.0","id":"gw-1","result": %b}' % PLAIN, PLAIN, None),
        (b'{"result":\n%b,"jsonrpc":"2.0","id":"gw-1"}' % PLAIN, PLAIN, None),
        (b'{"jsonrpc":"2.0","id":"gw-1","result":{"content":[null]}}', b'{"content":[null]}', None),
        (b'{"jsonrpc":"2.0","id":"gw-1","result":{"tools":[]}}', b'{"tools":[]}', None),
        (b'{"id":"gw-1","jsonrpc":"2.0","result":%b}' % PLAIN, PLAIN, None),
        (b'{"jsonrpc":"2.0","id":"gw-1","result":%b,"x":1}' % PLAIN, PLAIN, None),
        (b'{"jsonrpc":"2.0","id":"gw-1","result":%b,"result":%b}' % (FAILED, PLAIN), PLAIN, None),
        (b'{"result":%b,"id":1,"jsonrpc":"2.0","id":"gw-1"}' % PLAIN, PLAIN, None),
        (b'{"jsonrpc":"2.0","id":"gw-2","result":%b}' % PLAIN, None, None),
        (b'{"result":%b,"jsonrpc":"2.0","id":"gw-2"}' % PLAIN, None, None),
    ],
)
def test_the_answer_to_the_call_is_read_at_once_if_it_has_the_usual_form(
    data: bytes, result: bytes | None, *, is_tool_error: bool | None
) -> None:
    plain = inbound.plain_answer(data, CALL)
    assert (plain is not None) is (is_tool_error is not None)
    answer = plain or inbound.answer(jsonrpc.message(data), CALL)
    if result is None:
        assert answer is None
        return
    assert isinstance(answer, on.Resulted)
    assert (bytes(answer.result), answer.is_tool_error) == (result, is_tool_error)


@pytest.mark.parametrize(
    "data",
    [
        b'{"jsonrpc":"2.0","id":"gw-1","result":%b' % PLAIN,
        b'{"jsonrpc":"2.0","id":"gw-1","result":%b}}' % PLAIN,
        b'{"jsonrpc":"2.0","id":"gw-1","result":}',
        b'{"jsonrpc":"2.0","id":"gw-1","result":{}',
        b'{"jsonrpc":"2.0","id":"gw-1","result":{"content":[{"type":"text","text":"\xff"}]}}',
        b'{"result":,"jsonrpc":"2.0","id":"gw-1"}',
        b'{"result":%b,"x":,"jsonrpc":"2.0","id":"gw-1"}' % PLAIN,
    ],
)
def test_an_answer_of_the_usual_form_that_is_not_json_is_refused(data: bytes) -> None:
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        _ = inbound.plain_answer(data, CALL) or jsonrpc.message(data)


@pytest.mark.parametrize("failure", [None, ReplyCut()])
def test_the_end_of_a_reply_whose_call_was_given_up_is_no_bug(failure: Exception | None) -> None:
    session = object.__new__(Session)
    session.in_flight = None
    session.over(Mock(), failure)
