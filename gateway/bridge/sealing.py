"""Makes the InputRequiredResult of a round with its sealed requestState."""

import time
from collections.abc import Sequence

from msgspec import Raw

from gateway.bridge.context import Context
from gateway.exchange import questions
from gateway.exchange.commands import Ask
from gateway.exchange.questions import Question
from gateway.identity.principal import of_headers
from gateway.protocol import jsonrpc, mcp
from gateway.protocol.errors import CallLost
from gateway.routes.deadlines import wait_seconds
from gateway.seal import handoff
from gateway.seal.request_state import Binding, Envelope, Upstream, bind, pack_record


class Sealing:
    """The sealing of one exchange, round after round."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._binding: Binding | None = None
        """Made once: every round is bound to the same request and principal."""

    def seal(self, exchange_id: str, ask: Ask, upstream: Upstream | None) -> str:
        """The requestState of a round; `upstream` is where another replica would find the call.

        Raises CallLost if the state is too large and the gateway keeps nothing of the call.
        """
        live = self._context.live
        envelope = self._envelope(exchange_id, ask, upstream)
        live.process.metrics.sealed()
        for smaller in handoff.ever_smaller(envelope, held=ask.held):
            try:
                return live.process.sealer.seal(smaller)
            except ValueError:
                continue
        raise CallLost(
            "The answers of this call do not fit into its requestState (limits.state_bytes), and the route keeps them "
            "nowhere else (continuation: replay)"
        )

    def _envelope(self, exchange_id: str, ask: Ask, upstream: Upstream | None) -> Envelope:
        live, exchange, span = self._context.live, self._context.exchange, self._context.span
        now = time.time()
        return Envelope(
            issued=now,
            expires=now + wait_seconds(live.config),
            binding=self._bound(),
            exchange=exchange_id,
            round=ask.round,
            owner=live.process.owner if ask.held else "",
            epoch=live.process.epoch,
            state=ask.state,
            sheds=exchange.sheds,
            open=tuple(handoff.opened(question) for question in ask.questions.values()),
            upstream=upstream if ask.held else None,
            record=pack_record(exchange.record) if exchange.record is not None else None,
            trace=span.token if span is not None else None,
        )

    def _bound(self) -> Binding:
        if self._binding is None:
            route, request = self._context.live.route, self._context.request
            self._binding = bind(
                route.path, request, self._context.key.principal, route.bound_headers, self._header_digest
            )
        return self._binding

    def _header_digest(self, names: Sequence[str]) -> bytes:
        """The digest of the credentials in the headers of the newest leg; bound headers always go upstream."""
        return of_headers(names, self._context.headers.get)


def input_required(open_questions: dict[str, Question], state: str, server_info: Raw | None) -> bytes:
    """The InputRequiredResult of a round; one without questions only hands the state to the client."""
    parts: list[tuple[str, bytes | Raw]] = [("resultType", b'"input_required"')]
    if open_questions:
        parts.append(("inputRequests", questions.input_requests(open_questions)))
    parts.append(("requestState", jsonrpc.encode(state)))
    if server_info is not None:
        parts.append(("_meta", jsonrpc.merge([(mcp.META_SERVER_INFO, server_info)])))
    return jsonrpc.merge(parts)
