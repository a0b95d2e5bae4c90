"""The echo of upstream.py over stdio, for a proxy that has no other upstreams."""

import sys

from bench.upstream import INITIALIZED, TOOLS, decode, response, text_result


def reply(line: bytes) -> bytes:
    """What is answered to a message; empty for a notification."""
    incoming = decode(line)
    call_id = bytes(incoming.id)
    match incoming.method:
        case _ if not call_id:
            return b""
        case "initialize":
            return response(call_id, INITIALIZED)
        case "tools/list":
            return response(call_id, b'{"tools":%b}' % TOOLS)
        case "tools/call":
            return text_result(call_id, incoming.params.arguments.marker)
        case _:
            return response(call_id, b"{}")


if __name__ == "__main__":
    for line in sys.stdin.buffer:
        if answer := reply(line):
            sys.stdout.buffer.write(answer + b"\n")
            sys.stdout.buffer.flush()
