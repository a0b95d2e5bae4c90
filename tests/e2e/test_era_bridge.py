"""What docs/clients-and-servers.md says of real dual-era servers whose tools can ask only legacy clients.

With `era: bridge`, clients of both eras play with them in test_table.py.
"""

from typing import Final

import pytest

from tests.e2e.wire import wire
from tests.parts.launch import old_server
from tests.support.gateway_process import gateway

pytestmark = pytest.mark.real

NO_BACK_CHANNEL: Final = "no back-channel for server-initiated requests"
UNAVAILABLE: Final = "elicitation via server-initiated requests is unavailable on 2026-07-28 connections"


@pytest.mark.parametrize(
    ("name", "flags", "route", "words"),
    [
        ("dual-py", (), {}, NO_BACK_CHANNEL),
        ("dual-fm4", (), {}, UNAVAILABLE),
        ("dual-py", ("--stateless",), {"era": "bridge"}, NO_BACK_CHANNEL),
        ("dual-fm4", ("--stateless",), {"era": "bridge"}, NO_BACK_CHANNEL),
        ("modern-py", (), {"era": "bridge"}, "Handler returned an invalid result"),
        ("modern-ts-both", (), {"era": "bridge"}, "per-request legacy serving cannot receive"),
    ],
)
async def test_a_question_has_the_documented_symptom(
    name: str, flags: tuple[str, ...], route: dict[str, str], words: str
) -> None:
    async with old_server(name, *flags) as server, gateway(server.url, route=route) as gw, wire(gw.url) as client:
        assert (await client.call("echo", {"text": "hi"})).text == "hi"
        reply = await client.call("ask", {"question": "Who?"})
        said = reply.error["message"] if "error" in reply.final else reply.text
        assert words in said
