"""A modern client for the tests: the Python SDK 2.3.0, driven by JSON lines (see base.py)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import mcp_types as types
from base import (
    SAMPLING,
    Connection,
    Json,
    RefusedError,
    main,
    plain,
    request_meta,
    sampling_result,
)
from mcp import Client
from mcp.client.session import ClientRequestContext
from mcp.client.streamable_http import streamable_http_client
from mcp.client.subscriptions import SubscriptionLost
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.shared.dispatcher import ProgressFnT


class PyConnection(Connection):
    """The SDK's high-level `Client`; its callbacks refuse with an `ErrorData`."""

    client: Client
    subscription: "asyncio.Task[None] | None" = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        async with (
            create_mcp_http_client(headers=self.headers) as http,
            Client(
                streamable_http_client(self.url, http_client=http),
                client_info=types.Implementation(name="py-client", version="2.3.0"),
                elicitation_callback=self.elicit if self.declares else None,
                sampling_callback=self.sample if self.declares else None,
                sampling_capabilities=SAMPLING,
                list_roots_callback=self.list_roots if self.declares else None,
                logging_callback=self.log,
            ) as self.client,
        ):
            try:
                yield
            finally:
                if self.subscription is not None:
                    self.subscription.cancel()
                    await asyncio.wait({self.subscription})

    async def elicit(
        self, context: ClientRequestContext, params: types.ElicitRequestParams
    ) -> types.ElicitResult | types.ErrorData:
        try:
            return types.ElicitResult.model_validate(await self.answer("elicit", context.request_id, plain(params)))
        except RefusedError as exc:
            return types.ErrorData(code=types.INTERNAL_ERROR, message=str(exc))

    async def sample(
        self, context: ClientRequestContext, params: types.CreateMessageRequestParams
    ) -> types.CreateMessageResult | types.CreateMessageResultWithTools | types.ErrorData:
        try:
            return sampling_result(await self.answer("sample", context.request_id, plain(params)))
        except RefusedError as exc:
            return types.ErrorData(code=types.INTERNAL_ERROR, message=str(exc))

    async def list_roots(self, context: ClientRequestContext) -> types.ListRootsResult | types.ErrorData:
        try:
            return types.ListRootsResult.model_validate(await self.answer("roots", context.request_id, {}))
        except RefusedError as exc:
            return types.ErrorData(code=types.INTERNAL_ERROR, message=str(exc))

    async def call_tool(self, command: Json, progress: ProgressFnT | None) -> Json:
        result = await self.client.call_tool(
            command["name"], command["arguments"], progress_callback=progress, meta=request_meta(command)
        )
        return plain(result)

    async def listen(self, command: Json) -> Json:
        """Open a subscription to `notifications` and keep it; what the server honours."""
        chosen = command["notifications"]
        loop = asyncio.get_running_loop()
        honoured: asyncio.Future[Json] = loop.create_future()
        self.events: asyncio.Queue[list[str] | None] = asyncio.Queue()
        self.ended: str | None = None

        async def subscribe() -> None:
            try:
                async with self.client.listen(
                    tools_list_changed=chosen.get("toolsListChanged", False),
                    prompts_list_changed=chosen.get("promptsListChanged", False),
                    resources_list_changed=chosen.get("resourcesListChanged", False),
                    resource_subscriptions=chosen.get("resourceSubscriptions", ()),
                ) as subscription:
                    honoured.set_result(plain(subscription.honored))
                    async for event in subscription:
                        self.events.put_nowait([type(event).__name__, getattr(event, "uri", "")])
                self.ended = "graceful"
            except SubscriptionLost:
                self.ended = "remote"
            except Exception as exc:
                if honoured.done():
                    raise
                honoured.set_exception(exc)
            self.events.put_nowait(None)

        # A task of its own: the SDK's context must be left where it was entered.
        self.subscription = loop.create_task(subscribe())
        return await honoured

    async def heard(self, command: Json) -> Json:
        """Wait for `count` events since the last time, or for the end: `events`, and `ended` with how."""
        events: list[list[str]] = []
        while len(events) < command.get("count", 1_000_000):
            event = await self.events.get()
            if event is None:
                break
            events.append(event)
        return {"events": events, "ended": self.ended}


if __name__ == "__main__":
    main(PyConnection)
