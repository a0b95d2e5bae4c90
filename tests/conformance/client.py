"""The program that client scenarios of the conformance suite start: a gateway before the suite's server, and a client.

    MCP_CONFORMANCE_SCENARIO=tools_call python -m tests.conformance.client http://localhost:PORT/mcp

So the suite sees the upstream side of the gateway, and judges it as a client of 2025-11-25. The exit code is 0 when
the modern client was served as it should be.
"""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from tests.e2e.wire import wire
from tests.support.workbench import Client, start


async def initialize(client: Client) -> None:
    assert (await client.post("server/discover")).result["supportedVersions"]


async def tools_call(client: Client) -> None:
    assert (await client.post("tools/list")).result["tools"]
    assert (await client.call("add_numbers", {"a": 2, "b": 3})).text == "The sum of 2 and 3 is 5"


async def elicitation_defaults(client: Client) -> None:
    """A client answers with the defaults of the form, so the gateway must not lose one."""
    asked = await client.call("test_client_elicitation_defaults")
    (key,) = asked.asks
    properties: dict[str, Any] = asked.result["inputRequests"][key]["params"]["requestedSchema"]["properties"]
    content = {name: schema["default"] for name, schema in properties.items()}
    assert (await client.answer(asked, {"action": "accept", "content": content})).text


async def sse_retry(client: Client) -> None:
    assert (await client.call("test_reconnection")).text == "Reconnection test completed successfully"


async def json_schema(client: Client) -> None:
    tools = {tool["name"]: tool for tool in (await client.post("tools/list")).result["tools"]}
    schema = tools["json_schema_2020_12_tool"]["inputSchema"]
    assert (await client.call("json_schema_echo", {"schema": schema})).text == "echoed"


SCENARIOS: dict[str, Callable[[Client], Awaitable[None]]] = {
    "initialize": initialize,
    "tools_call": tools_call,
    "elicitation-sep1034-client-defaults": elicitation_defaults,
    "sse-retry": sse_retry,
    "json-schema-2020-12-preservation": json_schema,
}


async def main(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        stand = await start(url, http)
        try:
            async with wire(stand.url) as client:
                await SCENARIOS[os.environ["MCP_CONFORMANCE_SCENARIO"]](client)
        finally:
            await stand.gateway.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
