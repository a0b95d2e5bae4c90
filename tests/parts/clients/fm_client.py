"""A modern client for the tests: fastmcp 4.0.11, driven by JSON lines (see base.py)."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import mcp_types as types
from base import (
    SAMPLING,
    Connection,
    Json,
    main,
    plain,
    request_meta,
    sampling_result,
)
from fastmcp import Client
from fastmcp.client.elicitation import ElicitResult
from fastmcp.client.transports import StreamableHttpTransport
from mcp.shared.dispatcher import ProgressFnT
from pydantic_core import to_jsonable_python


class FmConnection(Connection):
    """fastmcp's `Client`, on the Python SDK's session. It turns whatever a handler raises into a refusal."""

    client: Client[StreamableHttpTransport]
    whole = "_mcp"

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        self.client = Client(
            StreamableHttpTransport(self.url, headers=self.headers),
            client_info=types.Implementation(name="fm-client", version="4.0.11"),
            elicitation_handler=self.elicit if self.declares else None,
            sampling_handler=self.sample if self.declares else None,
            sampling_capabilities=SAMPLING,
            roots=self.list_roots if self.declares else None,
            log_handler=self.log,
        )
        async with self.client:
            yield

    async def elicit(
        self, _message: str, _response_type: Any, params: types.ElicitRequestParams, context: Any
    ) -> ElicitResult[Json]:
        answer = await self.answer("elicit", context.request_id, plain(params))
        return ElicitResult[Json].model_validate(answer)

    async def sample(self, _messages: Any, params: types.CreateMessageRequestParams, context: Any) -> Any:
        return sampling_result(await self.answer("sample", context.request_id, plain(params)))

    async def list_roots(self, context: Any) -> Any:
        answer = await self.answer("roots", context.request_id, {})
        return types.ListRootsResult.model_validate(answer).roots

    async def call_tool(self, command: Json, progress: ProgressFnT | None) -> Json:
        result = await self.client.call_tool(
            command["name"],
            command["arguments"],
            progress_handler=progress,
            # As the other clients give it; by default fastmcp raises ToolError(text of the result).
            raise_on_error=False,
            meta=request_meta(command),
        )
        fields = {
            "content": [plain(block) for block in result.content],
            "structuredContent": result.structured_content,
            "isError": result.is_error,
            "_meta": result.meta,
            "data": to_jsonable_python(result.data, fallback=str),
        }
        return {name: value for name, value in fields.items() if value is not None}


if __name__ == "__main__":
    main(FmConnection)
