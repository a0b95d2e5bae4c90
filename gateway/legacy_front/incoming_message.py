"""Reads the message in the body of a legacy client's request."""

import msgspec
from msgspec import Raw

from gateway.http.incoming import Incoming
from gateway.http.upstream_headers import for_call, own_headers
from gateway.legacy_front.arrival import Arrival
from gateway.legacy_front.backend import ClientMessage
from gateway.protocol import jsonrpc
from gateway.protocol.errors import InvalidRequest, ParseError
from gateway.protocol.json_text.json_bounds import TooMany, check_bounds
from gateway.protocol.reply_messages import is_response


def read(at: Arrival) -> ClientMessage:
    """Return the message with the headers that go upstream; raises ParseError or InvalidRequest."""
    incoming, route = at.incoming, at.live.route
    message = opened(incoming)
    headers = for_call(route, incoming.headers)
    _ = headers.pop(at.caller.distrusted_header or "", None)
    headers.update(own_headers(route))
    return ClientMessage(incoming.body, message, headers)


def opened(incoming: Incoming) -> jsonrpc.Message:
    """Return the message; raises ParseError or InvalidRequest."""
    body = incoming.body
    try:
        check_bounds(body)
        _ = jsonrpc.distinct(body)
        message = jsonrpc.message(body)
    except jsonrpc.RepeatedKey as exc:
        raise InvalidRequest("The message repeats a key; send each key once") from exc
    except msgspec.ValidationError as exc:
        raise InvalidRequest(
            "The body must be one JSON-RPC object; a batch is not served in this session, send each message alone"
        ) from exc
    except TooMany as exc:
        raise InvalidRequest(f"The message has {exc}; send fewer in one message") from exc
    except ValueError as exc:
        raise ParseError(f"The body is not valid JSON: {exc}") from exc
    _check(message)
    return message


def _check(message: jsonrpc.Message) -> None:
    if message.jsonrpc != "2.0":
        raise InvalidRequest('"jsonrpc" must be "2.0"')
    if isinstance(message.id, Raw) and not jsonrpc.is_id(message.id):
        raise InvalidRequest('"id" must be a string or an integer')
    answers = is_response(message)
    if (message.method is None) is not answers or (answers and not isinstance(message.id, Raw)):
        raise InvalidRequest("The message is neither a request, nor a notification, nor a response")
