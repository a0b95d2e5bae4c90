import pytest

from gateway.config.model.route import RouteTasks
from gateway.protocol.errors import TasksUndeclared
from gateway.protocol.request_meta import Capabilities
from gateway.tasks.task_choice import Choice, choose

NONE, EXTENSION, OLD = Capabilities(), Capabilities(tasks=True), Capabilities(legacy_tasks=True)
DEFAULT, DRIVE, REFUSE = RouteTasks(), RouteTasks(optional="drive"), RouteTasks(undeclared="refuse")


@pytest.mark.parametrize(
    ("support", "declared", "tasks", "wants", "choice"),
    [
        ("", EXTENSION, DRIVE, True, "plain"),
        ("forbidden", EXTENSION, DRIVE, True, "plain"),
        ("odd", EXTENSION, DRIVE, True, "plain"),
        ("optional", EXTENSION, DEFAULT, False, "give"),
        ("required", EXTENSION, REFUSE, False, "give"),
        ("optional", OLD, DEFAULT, True, "give"),
        ("optional", OLD, DEFAULT, False, "plain"),
        ("required", OLD, DEFAULT, False, "drive"),
        ("optional", NONE, DEFAULT, True, "plain"),
        ("optional", NONE, DRIVE, False, "drive"),
        ("optional", NONE, REFUSE, False, "plain"),
        ("required", NONE, DEFAULT, False, "drive"),
    ],
)
def test_a_tool_is_called_as_tool_client_and_route_say(
    support: str,
    declared: Capabilities,
    tasks: RouteTasks,
    wants: bool,  # noqa: FBT001
    choice: Choice,
) -> None:
    assert choose(support, declared, tasks, wants=wants) == choice


def test_a_required_tool_is_refused_if_the_route_says_so() -> None:
    with pytest.raises(TasksUndeclared) as caught:
        choose("required", NONE, REFUSE, wants=False)
    assert caught.value.data == {"requiredCapabilities": {"extensions": {"io.modelcontextprotocol/tasks": {}}}}
