"""The list of the pure targets."""

from typing import Final

from tests.fuzz import content_targets, protocol_targets, trust_targets
from tests.fuzz.target import Target

TARGETS: Final = {
    target.name: target
    for target in (
        Target("request", protocol_targets.read_request),
        Target("sse", protocol_targets.event_stream),
        Target("jsonrpc", protocol_targets.json_rpc),
        Target("stdio", protocol_targets.stdio_lines),
        Target("parameters", protocol_targets.tool_parameters),
        Target("state", trust_targets.sealed_state),
        Target("mirror", trust_targets.mirror_token),
        Target("peer", trust_targets.peer_message),
        Target("host", trust_targets.host_and_origin),
        Target("token", trust_targets.bearer_token),
        Target("result", content_targets.result),
        Target("question", content_targets.question),
        Target("config", content_targets.configuration),
    )
}
