"""Answers requests for the status, and for the documents that its page links to."""

from typing import Final

import msgspec

from gateway.admin.process_parts import ProcessParts
from gateway.cluster.peer_client import PeerClient
from gateway.http.server.request import HttpRequest
from gateway.http.server.response import Response, TextResponse, WholeResponse
from gateway.plugins.status_page.cluster_view import ClusterView
from gateway.plugins.status_page.documents import TITLES, document
from gateway.plugins.status_page.status_page import every_seconds, page
from gateway.plugins.status_page.status_view import judged
from gateway.plugins.status_page.templates import HEADERS

_STATUS: Final = ("/status", "/status.json")
_DOCS: Final = "/docs/"
_BARE: Final = {"/": "status", "/docs": "docs/"}
"""Where paths lead that people type."""


class StatusPages:
    """The pages of one serving process."""

    def __init__(self, parts: ProcessParts, peers: PeerClient) -> None:
        self.cluster = ClusterView(parts, peers)

    async def handle(self, http: HttpRequest) -> Response | None:
        """Return the status of the whole cluster, or of the replica that the query names; None for other paths."""
        if not is_status(http):
            return other_page(http)
        query = http.head.url.query
        replica = query.get("replica")
        status = await self.cluster.status(replica)
        if wants_json(http):
            # Only here: another replica that got them too would add its own to them.
            return status_response(http, msgspec.json.encode(judged(status)))
        only_replica = replica if replica == status.replica and status.covers == "replica" else None
        seconds = every_seconds(query.get("refresh"))
        return status_response(http, page(status, seconds, query.get("route"), only_replica).encode())


def is_status(http: HttpRequest) -> bool:
    """Return whether a request is for the status, not for a document."""
    return http.head.path in _STATUS


def other_page(http: HttpRequest) -> Response | None:
    """Return what is at another path than the status: a document or their list, or the way to one."""
    path = http.head.path
    if (place := _BARE.get(path)) is not None:
        return TextResponse(f"see /{place}\n", 302, {"Location": place})
    name = path.removeprefix(_DOCS) or "README.md"
    # Only a listed name becomes a file's, so `..` leads nowhere, and no other is remembered.
    text = document(name) if path.startswith(_DOCS) and name in TITLES else None
    return None if text is None else _response(text.encode(), "text/html")


def wants_json(http: HttpRequest) -> bool:
    """Return whether the status is for a program: by its path, or by an Accept header that names JSON and no HTML."""
    accept = http.head.headers.get("Accept", "")
    return http.head.path == "/status.json" or ("application/json" in accept and "text/html" not in accept)


def status_response(http: HttpRequest, status: bytes) -> Response:
    """Return the response with a page, or with JSON."""
    return _response(status, "application/json" if wants_json(http) else "text/html")


def _response(body: bytes, kind: str) -> Response:
    return WholeResponse(body, headers={"Content-Type": f"{kind}; charset=utf-8", **HEADERS})
