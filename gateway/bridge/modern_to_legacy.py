"""Translates a modern request into its legacy call, the events of that call into modern ones."""

from typing import Final

from msgspec import Raw

from gateway.bridge.call_context import ClientCall, Context
from gateway.bridge.response_queue import ResponseQueue
from gateway.exchange import events as on
from gateway.exchange import results
from gateway.protocol import jsonrpc, mcp, tool_list
from gateway.protocol.errors import CallLost
from gateway.protocol.json_text.json_bounds import TooMany
from gateway.protocol.request import Request, TextParams
from gateway.sessions.call import Call, Listener
from gateway.sessions.pool import tool_schemas
from gateway.telemetry import COMPLETE, TOOL_FAILED, Ending, Outcome, Span, with_context

_NO_RESULT: Final = Ending(Outcome.ERROR, str(CallLost.code))
"""How an upstream call ends whose result cannot be passed on."""


def legacy_call(
    request: Request, call_id: bytes, listener: Listener, span: Span | None = None, task: object | None = None
) -> Call:
    """The request as a legacy server knows it; `task` asks the server to run it as a task."""
    said, params = request.said, request.params
    token = call_id if said.progress_token is not None else b""  # the client's may come again in this session
    if not token and task is None and span is None and not said.user_meta:
        text = params.text if isinstance(params, TextParams) else params
        return Call(call_id, jsonrpc.request(call_id, request.method, text), listener)
    meta: dict[str, Raw] = dict(said.user_meta)
    if token:
        meta[mcp.META_PROGRESS_TOKEN] = Raw(token)
    members: dict[str, object] = dict(params.items())
    if task is not None:
        members["task"] = task
    if span is not None:  # it has the client's trace context, as far as that is valid
        meta = with_context(meta, {name: Raw(jsonrpc.encode(value)) for name, value in span.headers().items()})
    if meta:
        members["_meta"] = meta
    return Call(call_id, jsonrpc.request(call_id, request.method, members), listener, token)


def modern_event(context: Context, event: on.Event) -> on.Event:
    """What the legacy server said, as the exchange knows it; an answer is counted."""
    request, route = context.request, context.live.route
    match event:
        case on.Resulted(result=result):
            assert context.server_info, "a result comes from a session"
            try:
                modern = modern_result(context, result, context.server_info, is_later_round=context.exchange.round > 0)
            except ValueError as exc:
                context.answered(_NO_RESULT)
                flaw = f"has {exc}" if isinstance(exc, TooMany) else "is not an object"
                return on.Broke(CallLost.by(route.where, f"answered {request.method} with a result that {flaw}"))
            context.resulted(TOOL_FAILED if modern.is_tool_error else COMPLETE)
            return on.Resulted(modern.body)
        case on.Failed(error=error):
            context.answered(Ending(Outcome.ERROR, str(error.code)))
            if error.code == mcp.LEGACY_URL_REQUIRED:
                return event  # as it is: the exchange makes a round of its URLs
            return on.Failed(results.modern_error(request.method, request.target, error))
        case on.Withdrawn(id=id_):
            return on.Withdrawn(id_, replayable=context.may_run_twice)
        case _:
            return event


def modern_notification(event: on.Progressed | on.Logged, leg: ResponseQueue) -> bytes | None:
    """The notification as the client of a leg gets it; None if it did not ask for any like this."""
    if isinstance(event, on.Progressed):
        token = leg.progress_token
        return None if token is None else jsonrpc.notification(mcp.PROGRESS, {**event.params, "progressToken": token})
    levels = mcp.LOG_LEVELS
    if leg.log_level is None or event.level not in levels[levels.index(leg.log_level) :]:
        return None
    return b'{"jsonrpc":"2.0","method":"%b","params":%b}' % (mcp.LOG.encode(), bytes(event.params))


def modern_result(
    call: ClientCall,
    result: bytes | Raw,
    server_info: bytes,
    *,
    is_later_round: bool = False,
) -> results.Modern:
    """The modern result. The pool learns the tools of a list, for later calls.

    Raises ValueError if the result is not an object.
    """
    live, request, method = call.live, call.request, call.request.method
    pool = live.upstream.pool
    is_retried = is_later_round or request.input_responses is not None
    cache = live.route.cache.of(method)
    if method != mcp.TOOLS_LIST:
        return results.modern(method, result, server_info, cache, retried=is_retried)
    listed = tool_list.read(Raw(result))
    pool.leave_out(listed.left_out)
    legacy = listed.result
    shown = legacy if request.said.declared.legacy_tasks else tool_list.without_execution(legacy)
    modern = results.modern(method, shown, server_info, cache, retried=is_retried)
    if (tools := tool_schemas.only_page(request.params, listed)) is not None:
        pool.group(call.key).tools.learn(tools, call.headers)
    return modern
