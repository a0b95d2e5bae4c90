"""JSON-RPC batches of servers of 2025-03-26."""

import pytest

from gateway.upstream.jsonrpc_batches import hand_over, unpacked

UNPACKED: dict[str, tuple[bytes, list[bytes]]] = {
    "a message": (b'{"id":1}', [b'{"id":1}']),
    "a message after a space": (b' {"id":1}', [b' {"id":1}']),
    "a batch": (b'[{"id":1},{"id":2}]', [b'{"id":1}', b'{"id":2}']),
    "a batch after a space": (b'\n[{"id":1}]', [b'{"id":1}']),
    "an empty batch": (b"[]", []),
    "a batch that ends early": (b'[{"id":1}', [b'[{"id":1}']),
    "a batch that is nested too deeply": (b"[" * 100_000, [b"[" * 100_000]),
    "the largest batch": (b"[" + b"{}," * 99 + b"{}]", [b"{}"] * 100),
    "a batch of too many messages": (b"[" + b"{}," * 100 + b"{}]", [b"[" + b"{}," * 100 + b"{}]"]),
    "something else": (b"5", [b"5"]),
    "nothing": (b"", [b""]),
}


@pytest.mark.parametrize(("data", "messages"), UNPACKED.values(), ids=UNPACKED)
def test_a_batch_is_unpacked_and_anything_else_stays_as_it_is(data: bytes, messages: list[bytes]) -> None:
    assert list(unpacked(data)) == messages


@pytest.mark.parametrize(
    ("data", "answered"), [(b'[{"a":1},{"answer":1},{"b":1}]', True), (b'[{"a":1}]', False), (b'{"answer":1}', True)]
)
def test_every_message_of_a_batch_is_handed_over_also_after_the_answer(data: bytes, *, answered: bool) -> None:
    received: list[bytes] = []

    def receive(message: bytes) -> bool:
        received.append(message)
        return b"answer" in message

    assert hand_over(data, receive) is answered
    assert received == list(unpacked(data))
