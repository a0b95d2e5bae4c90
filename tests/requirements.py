"""What the specification demands of a server in the gateway's place, and the tests that hold it to that.

One entry per sentence: the page below `specification/2026-07-28`, its section, the sentence, and the tests by node id
(without parameters). `test_requirements` fails when an entry names a test that does not exist.
"""

from typing import Final, NamedTuple

SITE: Final = "https://modelcontextprotocol.io/specification/2026-07-28"


class Requirement(NamedTuple):
    """One sentence of the specification."""

    page: str
    section: str
    sentence: str
    tests: tuple[str, ...]

    @property
    def link(self) -> str:
        """Where the sentence stands."""
        return f"{SITE}/{self.page}#{self.section}"


MRTR: Final = "basic/patterns/mrtr"
HTTP: Final = "basic/transports/streamable-http"
INDEX: Final = "basic/index"
CACHING: Final = "server/utilities/caching"
LOGGING: Final = "server/utilities/logging"
PROGRESS: Final = "basic/patterns/progress"
CANCELLATION: Final = "basic/patterns/cancellation"

EXCHANGE: Final = "tests/exchange/test_machine.py::"
REQUEST: Final = "tests/protocol/test_request.py::"
HEADER: Final = "tests/protocol/test_header_mismatch.py::"
ERRORS: Final = "tests/protocol/test_errors.py::"
RESULTS: Final = "tests/exchange/test_results.py::"
INPUTS: Final = "tests/exchange/test_input_requests.py::"
JSONRPC: Final = "tests/protocol/test_jsonrpc.py::"
NEGOTIATE: Final = "tests/exchange/test_handshake.py::"
TOOLPARAMS: Final = "tests/protocol/test_param_headers.py::"
DRIVER: Final = "tests/bridge/test_driver.py::"
NEWEST_LEG: Final = DRIVER + "test_two_parallel_retries_share_one_answer_and_each_gets_the_end_under_its_own_ids"
TRANSLATION: Final = "tests/bridge/test_modern_to_legacy.py::"
PROPERTIES: Final = "tests/property/test_exchange_properties.py::test_whatever_happens_every_promise_is_kept"

REQUIREMENTS: Final = (
    # -- multi round-trip requests
    Requirement(
        MRTR,
        "supported-requests",
        "Servers MUST NOT send InputRequiredResult responses on any other client requests.",
        (
            "tests/bridge/test_holds.py::test_other_methods_never_ask",
            EXCHANGE + "test_a_request_that_may_not_ask_does_not_shed",
            EXCHANGE + "test_a_url_error_to_a_request_that_may_not_ask_is_an_internal_error",
            PROPERTIES,
        ),
    ),
    Requirement(
        MRTR,
        "server-requirements-basic-workflow",
        "inputRequests keys are server assigned identifiers and MUST be unique within the scope of the request.",
        (
            EXCHANGE + "test_the_title_of_the_form_is_the_key_and_keys_are_never_given_twice",
            INPUTS + "test_keys_are_unique",
            PROPERTIES,
        ),
    ),
    Requirement(
        MRTR,
        "server-requirements-basic-workflow",
        "inputRequests values are request objects that MUST be one of ElicitRequest, CreateMessageRequest, or "
        "ListRootsRequest.",
        (
            INPUTS + "test_params_go_through_untouched",
            INPUTS + "test_what_the_new_revision_does_not_know_is_taken_out",
            EXCHANGE + "test_what_no_client_could_answer_is_refused_upstream_and_the_call_goes_on",
        ),
    ),
    Requirement(
        MRTR,
        "server-requirements-basic-workflow",
        "Servers MUST NOT send an inputRequests that the client has not declared support for in its capabilities.",
        (
            "tests/bridge/test_driver.py::test_a_client_that_did_not_declare_is_never_asked",
            EXCHANGE + "test_a_url_for_a_client_that_cannot_visit_it_is_refused",
            INPUTS + "test_each_question_needs_its_capability_and_no_other",
            INPUTS + "test_an_error_without_proper_urls_is_malformed",
            PROPERTIES,
        ),
    ),
    Requirement(
        MRTR,
        "server-requirements-basic-workflow",
        "Servers MUST NOT assume that clients will fulfill the inputRequests or retry the original request.",
        (
            "tests/engine/test_timers.py::test_an_abandoned_call_is_settled_cancelled_and_freed",
            EXCHANGE + "test_urls_that_are_not_visited_in_time_free_the_session",
            EXCHANGE + "test_a_result_whose_client_does_not_return_is_dropped",
        ),
    ),
    Requirement(
        MRTR,
        "error-handling",
        "Servers SHOULD validate that the data provided by the client is a valid InputResponses object and that the "
        "information inside can be correctly parsed.",
        (
            INPUTS + "test_an_answer_of_the_wrong_kind_is_refused",
            "tests/bridge/test_driver.py::test_an_answer_of_the_wrong_kind_leaves_the_call_parked",
            REQUEST + "test_a_fault_is_refused",
        ),
    ),
    Requirement(
        MRTR,
        "error-handling",
        "If additional, unexpected parameters are provided in the InputResponses object, the server SHOULD ignore any "
        "information it does not recognize or need.",
        (EXCHANGE + "test_unknown_keys_are_ignored",),
    ),
    Requirement(
        MRTR,
        "error-handling",
        "If the client fails to send all the information requested in a previous InputRequests, the server SHOULD "
        "respond with a new InputRequiredResult requesting the missing information again.",
        (
            EXCHANGE + "test_missing_answers_are_asked_again_in_the_same_round",
            EXCHANGE + "test_only_the_missing_answers_are_asked_again",
            EXCHANGE + "test_of_several_urls_only_those_not_accepted_yet_are_asked_again",
        ),
    ),
    # -- the base protocol
    Requirement(
        INDEX,
        "requests",
        "Requests MUST include a string or integer ID. Unlike base JSON-RPC, the ID MUST NOT be null.",
        (REQUEST + "test_a_fault_is_refused", JSONRPC + "test_an_id_is_a_string_or_an_integer"),
    ),
    Requirement(
        INDEX,
        "result-responses",
        "The result MUST include a resultType field to indicate the type of the result.",
        (
            RESULTS + "test_an_old_result_becomes_a_complete_one",
            RESULTS + "test_a_result_cannot_call_itself_anything_but_complete",
        ),
    ),
    Requirement(
        INDEX,
        "error-responses",
        "Error responses MUST include the same ID as the request they correspond to (except in error cases where the "
        "ID could not be read due a malformed request).",
        (REQUEST + "test_an_invalid_request_knows_the_id_it_answers_where_one_can_be_read",),
    ),
    Requirement(
        INDEX,
        "error-responses",
        "Error responses MUST include an error field with a code and message.",
        (JSONRPC + "test_an_error_with_an_empty_message_has_a_message",),
    ),
    Requirement(
        INDEX,
        "error-codes",
        "Implementations MUST NOT emit any code from this sub-range (-32020 to -32099) that is not defined by this "
        "specification, and MUST NOT emit -32002 and -32042.",
        (RESULTS + "test_an_old_error_keeps_to_the_new_codes",),
    ),
    Requirement(
        INDEX,
        "meta",
        "A request missing any required field is malformed; the server MUST reject it with JSON-RPC error code "
        "-32602. On HTTP, the response status MUST be 400 Bad Request.",
        (REQUEST + "test_a_fault_is_refused",),
    ),
    Requirement(
        INDEX,
        "meta",
        "If processing a request requires a capability the client did not include, the server MUST return a "
        "MissingRequiredClientCapabilityError (-32021) whose data.requiredCapabilities lists the missing "
        "capabilities.",
        (
            "tests/bridge/test_driver.py::test_a_client_that_did_not_declare_is_never_asked",
            EXCHANGE + "test_a_url_for_a_client_that_cannot_visit_it_is_refused",
        ),
    ),
    # -- the transport
    Requirement(
        HTTP,
        "sending-messages",
        "The body of the HTTP POST MUST be a single JSON-RPC request or notification.",
        (REQUEST + "test_a_fault_is_refused",),
    ),
    Requirement(
        HTTP,
        "receiving-messages",
        "The server MUST NOT send independent JSON-RPC requests on this stream.",
        ("tests/stories/test_stories.py::test_a_story_is_the_same_at_every_face_and_before_every_link", PROPERTIES),
    ),
    Requirement(
        HTTP,
        "cancellation",
        "Closing the SSE response stream MUST be treated by the server as cancellation of that request, and the "
        "server MUST NOT send any further messages for it.",
        (
            "tests/bridge/test_upstream_call.py::test_leaving_in_the_first_round_cancels_at_once_and_once",
            "tests/engine/test_timers.py::test_a_retry_that_is_not_repeated_is_cancelled_after_grace",
            PROPERTIES,
        ),
    ),
    Requirement(
        HTTP,
        "protocol-version-header",
        "The header value MUST match the protocolVersion field carried in the request body's _meta; otherwise the "
        "server MUST reject the request with 400 Bad Request and a HeaderMismatch JSON-RPC error.",
        (REQUEST + "test_a_fault_is_refused",),
    ),
    Requirement(
        HTTP,
        "protocol-version-header",
        "If the server does not implement the requested protocol version, it MUST respond with 400 Bad Request and an "
        "UnsupportedProtocolVersionError listing its supported versions.",
        (REQUEST + "test_a_fault_is_refused", ERRORS + "test_a_client_is_told_what_it_can_act_on"),
    ),
    Requirement(
        HTTP,
        "protocol-version-header",
        "If the server does not implement the requested RPC method, it MUST respond with 404 Not Found and a JSON-RPC "
        "error with code -32601.",
        (
            REQUEST + "test_a_fault_is_refused",
            "tests/downstream/test_handler.py::test_removed_and_unknown_methods_are_404",
        ),
    ),
    Requirement(
        HTTP,
        "value-encoding",
        "Servers MUST decode an encoded Mcp-Name or Mcp-Param-{Name} value before comparing it to the corresponding "
        "request body value.",
        (
            HEADER + "test_a_name_is_compared_as_it_was_meant",
            HEADER + "test_every_name_can_be_sent_in_base64",
            TOOLPARAMS + "test_a_header_that_repeats_its_argument_is_accepted",
        ),
    ),
    Requirement(
        HTTP,
        "server-behavior-for-custom-headers",
        "Any server that processes the message body MUST validate that encoded header values, after decoding if "
        "Base64-encoded, match the corresponding values in the request body.",
        (
            TOOLPARAMS + "test_a_header_that_differs_from_its_argument_is_refused",
            TOOLPARAMS + "test_a_header_must_be_there_when_its_argument_is_and_only_then",
            TOOLPARAMS + "test_arguments_without_the_parameter_need_no_header",
        ),
    ),
    Requirement(
        HTTP,
        "server-validation",
        "When validating integer parameter values, servers SHOULD compare the header value and the body value "
        "numerically rather than as strings.",
        (
            TOOLPARAMS + "test_a_header_that_repeats_its_argument_is_accepted",
            TOOLPARAMS + "test_integers_are_equal_exactly_when_they_are",
        ),
    ),
    Requirement(
        HTTP,
        "case-sensitivity",
        "Clients and servers MUST use case-insensitive comparisons for header names. Header values are "
        "case-sensitive.",
        (
            HEADER + "test_the_names_of_headers_may_be_in_any_case",
            REQUEST + "test_a_fault_is_refused",
        ),
    ),
    Requirement(
        HTTP,
        "server-validation",
        "Servers that process the request body MUST reject requests where the values specified in the headers do not "
        "match the corresponding values in the request body.",
        (REQUEST + "test_a_fault_is_refused", REQUEST + "test_of_two_faults_the_first_in_order_answers"),
    ),
    # -- caching
    Requirement(
        CACHING,
        "cacheable-results",
        "Servers MUST include caching hints on results with resultType complete returned by server/discover, "
        "tools/list, prompts/list, resources/list, resources/templates/list and resources/read.",
        (
            RESULTS + "test_an_old_result_becomes_a_complete_one",
            NEGOTIATE + "test_a_discover_result_repeats_the_handshake",
        ),
    ),
    Requirement(
        CACHING,
        "cache-key",
        "Results produced by retrying a request through the multi round-trip requests mechanism MUST NOT be cached.",
        (RESULTS + "test_a_result_that_depends_on_answers_is_not_cached",),
    ),
    # -- logging, progress, cancellation
    Requirement(
        LOGGING,
        "per-request-log-level",
        "The server MUST NOT emit notifications/message for a request that does not include this field.",
        (TRANSLATION + "test_logs_are_sent_at_or_above_the_level_asked_for",),
    ),
    Requirement(
        LOGGING,
        "per-request-log-level",
        "The server MUST NOT deliver it on any stream other than the one carrying the response to the request that "
        "set the log level.",
        (NEWEST_LEG,),
    ),
    Requirement(
        LOGGING,
        "error-handling",
        "If the logLevel value is not a recognized log level, the server SHOULD reject that request: -32602.",
        (REQUEST + "test_a_fault_is_refused",),
    ),
    Requirement(
        PROGRESS,
        "behavior-requirements",
        "Progress notifications MUST only reference tokens that were provided in an active request and are associated "
        "with an in-progress operation.",
        (DRIVER + "test_two_parallel_retries_share_one_answer_and_each_gets_the_end_under_its_own_ids", NEWEST_LEG),
    ),
    Requirement(
        PROGRESS,
        "implementation-notes",
        "Progress notifications MUST stop after completion.",
        (NEWEST_LEG,),
    ),
    Requirement(
        CANCELLATION,
        "timing-considerations",
        "Both parties MUST handle these race conditions gracefully.",
        (
            EXCHANGE + "test_closing_after_a_reply_is_no_cancellation",
            EXCHANGE + "test_a_late_event_changes_nothing",
        ),
    ),
)
