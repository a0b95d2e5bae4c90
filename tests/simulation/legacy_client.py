"""SIMULATED legacy clients (2025-11-25): a session, and questions on the stream of a call."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import msgspec

from tests.simulation import plain_http as http
from tests.simulation.client import Client, Told, name_of
from tests.simulation.plain_http import running_loop

_SECONDS: Final = 120.0
_CAPABILITIES: Final = {"elicitation": {"form": {}}, "sampling": {}}


_WANDERERS: Final = ("comes back", "comes back late", "hangs up", "hangs up away")
"""Clients that leave the stream of their call: they come back to it, or cancel the call."""
_OVER_SECONDS: Final = 4.0


class LegacyClient(Client):
    """Plays one call in a session of its own."""

    _event: str | None = None
    """The last event id of the call's stream."""

    async def _play(self) -> None:
        try:
            async with asyncio.timeout(_SECONDS):
                await self._in_session()
        except (OSError, http.Broken):
            self.record.outcome = self.record.outcome or "broken"

    async def _in_session(self) -> None:
        _ = await self._final(await self._initialize(_CAPABILITIES), 0)
        (await self._send_legacy({"method": "notifications/initialized"})).close()
        await self._call_tool()
        (await self._send_to(self._replica(), "DELETE", self._legacy_headers())).close()

    async def _call_tool(self) -> None:
        call = self._call
        params: dict[str, Any] = {"name": call.tool, "arguments": {"tag": call.tag, **call.script}}
        if call.script.get("reports"):
            params["_meta"] = {"progressToken": call.tag}
        reply = await self._send_legacy({"id": 1, "method": "tools/call", "params": params})
        if call.habit in _WANDERERS:
            await self._wander(reply)
            if self.record.outcome:
                return
            reply = await self._come_back()
        message = await self._final(reply, 1)
        told = Told(self._now(), 0, reply.status, message, is_first=True)
        self.record.told.append(told)
        self.record.final = told
        self.record.outcome = "result" if told.error is None else "error"

    async def _final(self, reply: http.Reply, id_: int) -> dict[str, Any]:
        """The response to a request; questions on its stream are answered meanwhile."""
        try:
            if not reply.headers.get("content-type", "").startswith("text/event-stream"):
                return dict(msgspec.json.decode(await reply.body()))
            finals = []
            async for _, message in reply.events():
                if message is None:
                    continue
                if "method" not in message:
                    finals.append(message)
                    if message.get("id") != id_:
                        self.record.strange.append(f"{id_} was answered with {message.get('id')}")
                elif "id" in message:
                    loop = running_loop()
                    loop.process.keep(loop.create_task(self._reply_to(message)))
            if len(finals) > 1:
                self.record.strange.append(f"{len(finals)} final messages")
            if not finals:
                raise http.Broken("no final message")
            return dict(finals[0])
        finally:
            reply.close()

    async def _wander(self, reply: http.Reply) -> None:
        """Take another stream for the first one, leave that one when it asks, answer, and stay away for a while."""
        try:
            _ = await self._read_until(reply, lambda message: message is None)
            second = await self._come_back()
        finally:
            reply.close()
        try:
            question = await self._read_until(second, lambda message: message is not None and "id" in message)
            if question is None or "method" not in question:
                raise http.Broken("no question")
            if self._call.habit == "hangs up":
                await self._hang_up()
        finally:
            second.close()
        if self._call.habit == "hangs up away":
            await asyncio.sleep(0.5)
            await self._hang_up()
        if self.record.outcome:
            return
        await self._reply_to(question)
        await asyncio.sleep(_OVER_SECONDS if self._call.habit == "comes back late" else 0.5)

    async def _read_until(self, reply: http.Reply, is_it: Callable[[Any], bool]) -> Any:
        """Read a stream up to a certain event; None if it ends before."""
        async for id_, message in reply.events():
            self._event = id_ or self._event
            if is_it(message):
                return message
        return None

    async def _come_back(self) -> http.Reply:
        """Open the stream of the call again, after its last event."""
        headers = {**self._legacy_headers(), "Last-Event-ID": self._event or ""}
        reply = await self._send_to(self._replica(), "GET", headers)
        if reply.status != 200 or not reply.headers.get("content-type", "").startswith("text/event-stream"):
            reply.close()  # the SDKs do not read it, and try again
            raise http.Broken(f"HTTP {reply.status}, and no stream")
        return reply

    async def _hang_up(self) -> None:
        """Cancel the call, twice."""
        for _ in range(2):
            cancelled = {"method": "notifications/cancelled", "params": {"requestId": 1}}
            (await self._send_legacy(cancelled)).close()
            await asyncio.sleep(0.3)
        self.record.outcome = "abandoned"

    async def _reply_to(self, question: Any) -> None:
        self.record.asked.append(name_of(question))
        await asyncio.sleep(self._call.think)
        with suppress(OSError, http.Broken):
            (await self._send_legacy({"id": question["id"], "result": self._answer(question)})).close()
