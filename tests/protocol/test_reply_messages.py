"""The JSON-RPC messages in the body of a reply, whole or cut off."""

import pytest

from gateway.protocol import reply_messages

PROGRESS = b'{"jsonrpc":"2.0","method":"notifications/progress"}'
RESULT = b'{"jsonrpc":"2.0","id":1,"result":{}}'
ERROR = b'{"jsonrpc":"2.0","id":1,"error":{"code":-1,"message":"no"}}'
STREAM = b"id: 7\ndata: %b\n\n: ping\n\ndata: what is this\n\nid: 8\ndata: %b\n\n" % (PROGRESS, RESULT)


@pytest.mark.parametrize(
    ("content_type", "body", "responses"),
    [
        ("application/json", RESULT, [True]),
        ("application/json", ERROR, [True]),
        ("application/json", PROGRESS, [False]),
        ("application/json", RESULT[:-1], []),
        ("text/html", b"<p>no</p>", []),
        ("text/event-stream", STREAM, [False, True]),
        ("text/event-stream", STREAM[:-1], [False]),
        ("text/event-stream", b"", []),
    ],
)
def test_the_messages_are_read_and_anything_else_is_skipped(
    content_type: str, body: bytes, responses: list[bool]
) -> None:
    assert [
        reply_messages.is_response(message) for message in reply_messages.messages(content_type, body)
    ] == responses


def test_the_events_keep_their_ids() -> None:
    assert [event.id for event in reply_messages.events(STREAM) if event.id] == ["7", "8"]
