"""Foreign text becomes a label only if it is in a list."""

import pytest

from gateway.telemetry.metrics.label_values import (
    ERROR_TYPES,
    bounded,
    bounded_kind,
    bounded_method,
    bounded_version,
)


@pytest.mark.parametrize("method", ["tools/call", "initialize", "sampling/createMessage", "ping"])
def test_a_method_of_the_specification_is_a_label(method: str) -> None:
    assert bounded_method(method) == method


@pytest.mark.parametrize("version", ["2026-07-28", "2025-11-25", "2024-11-05"])
def test_a_published_version_is_a_label(version: str) -> None:
    assert bounded_version(version) == version


def test_the_label_of_a_notification_is_its_kind() -> None:
    assert bounded_kind("notifications/progress") == "progress"
    assert bounded_kind("notifications/tools/list_changed") == "tools/list_changed"


def test_any_other_text_is_one_label() -> None:
    for bound in (bounded_method, bounded_version, bounded_kind):
        assert bound("tools/call ") == "other"
    assert bounded("expired", ("expired",)) == "expired"
    assert bounded("exp", ("expired",)) == "other"


def test_the_error_types_are_codes_and_the_error_of_a_tool() -> None:
    assert {"", "tool_error", "-32602", "-32000", "0"} <= ERROR_TYPES
    assert all(each in {"", "tool_error"} or int(each) <= 0 for each in ERROR_TYPES)
