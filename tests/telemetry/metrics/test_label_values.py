"""Foreign text becomes a label only if it is in a list."""

import pytest

from gateway.telemetry.metrics.label_values import ERROR_TYPES, METHODS, NOTIFICATIONS, VERSIONS, bounded


@pytest.mark.parametrize(
    ("known", "text"),
    [
        *((METHODS, method) for method in ("tools/call", "initialize", "sampling/createMessage", "ping")),
        *((VERSIONS, version) for version in ("2026-07-28", "2025-11-25", "2024-11-05")),
        *((NOTIFICATIONS, f"notifications/{kind}") for kind in ("progress", "tools/list_changed")),
    ],
)
def test_a_word_of_the_specification_is_a_label_and_any_other_text_is_one_label(
    known: frozenset[str], text: str
) -> None:
    assert bounded(text, known) == text
    assert bounded(f"{text} ", known) == "other"


def test_the_error_types_are_codes_and_the_error_of_a_tool() -> None:
    assert {"", "tool_error", "-32602", "-32000", "0"} <= ERROR_TYPES
    assert all(each in {"", "tool_error"} or int(each) <= 0 for each in ERROR_TYPES)
