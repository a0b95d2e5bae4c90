from collections.abc import Mapping
from types import MappingProxyType

from gateway.exchange import events as on
from gateway.protocol import jsonrpc
from gateway.sessions import inbound
from gateway.sessions.call import Call
from gateway.tasks.follower import held_id


class Heard:
    """A listener that remembers."""

    about: Mapping[str, str | None] = MappingProxyType({})

    def __init__(self) -> None:
        self.events: list[on.Event] = []

    def hear(self, event: on.Event) -> None:
        self.events.append(event)


def test_two_processes_name_their_held_requests_differently() -> None:
    processes = ("gw-1", "a"), ("gw-1", "b"), ("gw-2", "a")
    assert len({held_id(each, "task", 0) for each in processes}) == 3


def test_a_response_without_an_id_does_not_answer_a_task() -> None:
    refusal = jsonrpc.message(b'{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"Parse error"}}')
    assert inbound.answer(refusal, Call(b"", b"", Heard())) is None
