"""A FAKE collector: accepts requests to /v1/traces and shows them, or never answers."""

import asyncio
import gzip

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span  # noqa: TC002  (one import style)

from tests.support.served import Served


class FakeOtlp(Served):
    """An OTLP receiver over HTTP on loopback."""

    path = ""

    def __init__(self, *, hangs: bool = False) -> None:
        self.spans: list[Span] = []
        self.resource: dict[str, str] = {}
        self.keys: list[str] = []
        """The header X-Key of each request."""
        self.waiting = 0
        """Requests without an answer."""
        self._hangs = hangs
        self._over = asyncio.Event()

    async def close(self) -> None:
        self._over.set()
        await super().close()

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        assert (http.method, http.path) == ("POST", "/v1/traces")
        data = await http.read()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        if self._hangs:
            self.waiting += 1
            await self._over.wait()
        self.keys.append(http.headers.get("X-Key", ""))
        for each in ExportTraceServiceRequest.FromString(data).resource_spans:
            self.resource |= {pair.key: pair.value.string_value for pair in each.resource.attributes}
            self.spans += [span for scope in each.scope_spans for span in scope.spans]
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(), content_type="application/x-protobuf"
        )
