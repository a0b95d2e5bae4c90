"""docs/monitoring.md has the limits that cannot be configured, with the numbers of the code."""

import pytest

from gateway.auth import jwks
from gateway.bridge import subscription, upstream_call
from gateway.children import child, launcher, stderr_log
from gateway.cluster import membership, peer_connections
from gateway.config.parsing import yaml_tree
from gateway.downstream import stages
from gateway.exchange import handshake, input_requests, replay_ledger
from gateway.exchange import nested_requests as nested
from gateway.http import outbox, upstream_url
from gateway.http.server import listener, request_parser
from gateway.http_client import idle_connections, reply_parser
from gateway.identity import jwt_verification
from gateway.legacy_front import session, session_ids, stream
from gateway.mirror import call_rounds as mirrored
from gateway.mirror import client_requests
from gateway.plugins.oauth import oauth_proxy, oauth_upstream
from gateway.plugins.status_page import cluster_view
from gateway.protocol import errors, request_meta
from gateway.protocol.json_text.json_bounds import MAX_MEMBERS
from gateway.protocol.json_text.unpaired_surrogates import MAX_HALVES
from gateway.routes import deadlines
from gateway.runtime import arrivals
from gateway.seal import peer_messages, sep_1655_items
from gateway.server import peer_listener
from gateway.sessions import session as upstream_session
from gateway.sessions.pool import pool
from gateway.telemetry import redaction
from gateway.upstream.http import (
    era_probe,
    http_errors,
    http_sse,
    reply_reader,
    resumption,
    standalone_stream,
    streamable_http,
)
from tests.parts.launch import REPOSITORY

ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (REPOSITORY / "docs" / "monitoring.md").read_text().splitlines()
    if line.startswith("| ")
]


def seconds(value: float) -> str:
    return f"{value:g} s"


def size(value: int) -> str:
    return f"{value // 1024**2} MiB" if value % 1024**2 == 0 else f"{value // 1024} KiB"


def count(value: int) -> str:
    return f"{value:,}"


FIXED = [
    ("values that the gateway takes out", [count(MAX_MEMBERS)]),
    ("unpaired surrogates", [count(MAX_HALVES)]),
    ("questions of a mirrored task", [f"{mirrored.MAX_ROUNDS} rounds of {input_requests.MAX_QUESTIONS}"]),
    (
        "the pause between two polls of a mirrored task",
        [seconds(mirrored._LEAST_SECONDS), seconds(mirrored._MOST_SECONDS)],
    ),
    ("client info, client capabilities", [size(request_meta._MAX_DECLARATION_BYTES)]),
    (
        "client info that a [mirrored]",
        [f"{client_requests._MAX_INFO_BYTES:,} bytes", f"{client_requests._NAME_CHARACTERS} characters"],
    ),
    ("client capabilities that a mirrored session keeps", [f"{client_requests._MAX_CAPABILITIES_BYTES:,} bytes"]),
    ("the state of a client that keeps state", [f"{sep_1655_items._MAX_CHARACTERS:,} characters"]),
    ("headers of one request", [count(request_parser.MAX_HEADERS)]),
    ("the configuration file", [f"{yaml_tree.MAX_TEXT_CHARACTERS:,} characters"]),
    ("nesting in the configuration file", [f"{yaml_tree._MAX_DEPTH} levels"]),
    ("notifications a client is behind", [count(outbox._MAX_BEHIND)]),
    ("the body of a caller that is not verified", [size(stages._REFUSED_BYTES)]),
    (
        "answers of the gateway's own",
        [
            f"{upstream_session._MAX_UNSENT} in",
            f"{upstream_call._MAX_UNSENT} in",
            f"an id of {size(upstream_session._MAX_ID_BYTES)}",
        ],
    ),
    ("URIs of one subscription", [count(subscription._MAX_URIS)]),
    ("content of a change beside its URI", [size(subscription._MAX_PARAMS_BYTES)]),
    (
        "OAuth's paths",
        [count(oauth_proxy._AT_ONCE), size(oauth_proxy._BODY_BYTES), size(oauth_upstream.ANSWER_BYTES)],
    ),
    ("the server's InitializeResult", [size(handshake.MAX_RESULT_BYTES), size(handshake.MAX_INFO_BYTES)]),
    ("the head of an MCP reply", [size(reply_parser.MAX_HEAD_BYTES), f"{reply_parser.MAX_INTERIM_REPLIES} interim"]),
    (
        "an idle connection for MCP",
        [seconds(idle_connections.KEEP_ALIVE_SECONDS), f"{seconds(idle_connections._MARGIN_SECONDS)} less"],
    ),
    ("a TLS handshake of a client", [seconds(listener._HANDSHAKE_SECONDS)]),
    (
        "the keys of the tokens' issuer",
        [
            f"{seconds(jwks._FETCH_SECONDS)} for a fetch",
            size(jwks._MAX_BYTES),
            f"{jwt_verification._MAX_KEYS} keys",
            f"{seconds(jwks._PAUSE_SECONDS)} between two",
        ],
    ),
    ("a bearer token that is verified", [size(jwt_verification.MAX_TOKEN_CHARACTERS), count(jwks._TOKENS_KEPT)]),
    ("open requests of one session", [count(session._MAX_OPEN)]),
    ("a reply before it becomes a stream", [seconds(stream._FIRST_SECONDS)]),
    ("the id of a client's session", [count(session_ids._MAX_CHARACTERS)]),
    ("unfinished SSE events and JSON answers", [f"below {size(arrivals.SMALL_BYTES)}"]),
    ("open questions of one call", [count(input_requests.MAX_QUESTIONS)]),
    ("requests of the server in one call", [count(nested.MAX_NESTED), size(nested.MAX_NESTED_ID_BYTES)]),
    ("a key of `inputRequests`", [f"{input_requests._MAX_KEY} characters"]),
    ("recorded answers of one call", [size(replay_ledger.MAX_RECORD_BYTES)]),
    ("reruns of a call that may run twice", [f"{replay_ledger.MAX_RUNS} beside the first"]),
    ("stderr", [f"{stderr_log._LINE_BYTES:,} bytes a line", f"{stderr_log._LINES_PER_SECOND} lines a second"]),
    (
        "the pause after a child that died at its start",
        [seconds(launcher._FIRST_PAUSE_SECONDS), f"doubling to {seconds(launcher._LAST_PAUSE_SECONDS)}"],
    ),
    (
        "the end of a child",
        [f"{seconds(child._EOF_SECONDS)} after its input", f"{seconds(child._TERM_SECONDS)} after SIGTERM"],
    ),
    ("a connection to a peer", [f"{seconds(membership._SILENT_SECONDS)} (fixed)"]),
    ("a request from a peer", [size(peer_listener._OVERHEAD_BYTES)]),
    ("a peer's answer to a question", [size(peer_connections.ANSWER_BYTES)]),
    (
        "a peer's part of the status page",
        [
            size(cluster_view.STATUS_BYTES),
            seconds(cluster_view._ANSWER_SECONDS),
            f"{count(cluster_view._MOST_ASKED)} replicas",
        ],
    ),
    ("one frame from a peer", [size(peer_messages.FRAME_BYTES)]),
    ("clocks of two replicas", [seconds(peer_messages.SKEW_SECONDS)]),
    ("remembered requests from peers", [count(peer_messages._MAX_REMEMBERED)]),
    (
        "the name service",
        [
            seconds(membership._RESOLVE_SECONDS),
            f"asked every {seconds(membership._FRESH_SECONDS)}",
            f"at most every {seconds(membership._PAUSE_SECONDS)}",
        ],
    ),
    ("an unknown replica id", [seconds(membership._NAMELESS_SECONDS)]),
    ("a replica that greeted", [seconds(membership._GREETED_SECONDS)]),
    ("the head of the standalone GET stream", [seconds(standalone_stream.HEAD_SECONDS)]),
    (
        "the standalone GET stream, when it ends",
        [
            ", ".join(f"{pause:g}" for pause in standalone_stream.REOPEN_SECONDS[:-1])
            + f" and {seconds(standalone_stream.REOPEN_SECONDS[-1])}"
        ],
    ),
    ("the stream of HTTP+SSE, until it names its endpoint", [seconds(http_sse.ENDPOINT_SECONDS)]),
    (
        "a subscription without a session",
        [
            ", ".join(f"{pause:g}" for pause in subscription._PAUSES[:-1])
            + f" and then every {subscription._PAUSES[-1]:g} s",
            f"for {seconds(subscription._GIVE_UP_SECONDS)}",
        ],
    ),
    ("tools with a warning in the log", [count(pool._LEFT_OUT_KEPT)]),
    ("a session id", [count(streamable_http.MAX_SESSION_ID_CHARACTERS)]),
    ("the challenges of a refusal", [count(http_errors._CHALLENGE_CHARACTERS)]),
    ("a text of the server in an error", [f"{upstream_url._QUOTED_CHARACTERS} characters"]),
    ("an error's message", [count(errors.MESSAGE_CHARACTERS)]),
    ("a value in the log", [count(redaction.MAX_CHARACTERS)]),
    ("the id of an event", [count(resumption.MAX_EVENT_ID_CHARACTERS)]),
    ("event ids that are remembered for one call", [count(resumption.MAX_EVENT_IDS)]),
    (
        "delivery of a cancellation or DELETE",
        ["after pauses of {}, {} and {}".format(*map(seconds, deadlines.CANCEL_AGAIN_SECONDS))],
    ),
    ("the end of an answered stream", [seconds(reply_reader.DRAIN_SECONDS)]),
    (
        "the probe for the upstream's era",
        [
            seconds(era_probe.PROBE_SECONDS),
            f"one start in {seconds(era_probe.PAUSE_SECONDS)}",
            f"every {seconds(era_probe._DOUBT_SECONDS)}",
        ],
    ),
]


@pytest.mark.parametrize(("bound", "numbers"), FIXED, ids=[bound for bound, _ in FIXED])
def test_every_fixed_bound_on_the_pages_equals_the_code(bound: str, numbers: list[str]) -> None:
    (row,) = [row for row in ROWS if row[0].startswith(bound)]
    assert [number for number in numbers if number not in row[1] + row[2]] == [], row
