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
        ("", EXTENSION, DRIVE, True, Choice.PLAIN),
        ("forbidden", EXTENSION, DRIVE, True, Choice.PLAIN),
        ("odd", EXTENSION, DRIVE, True, Choice.PLAIN),
        ("optional", EXTENSION, DEFAULT, False, Choice.GIVE),
        ("required", EXTENSION, REFUSE, False, Choice.GIVE),
        ("optional", OLD, DEFAULT, True, Choice.GIVE),
        ("optional", OLD, DEFAULT, False, Choice.PLAIN),
        ("required", OLD, DEFAULT, False, Choice.DRIVE),
        ("optional", NONE, DEFAULT, True, Choice.PLAIN),
        ("optional", NONE, DRIVE, False, Choice.DRIVE),
        ("optional", NONE, REFUSE, False, Choice.PLAIN),
        ("required", NONE, DEFAULT, False, Choice.DRIVE),
    ],
)
def test_a_tool_is_called_as_tool_client_and_route_say(
    support: str,
    declared: Capabilities,
    tasks: RouteTasks,
    wants: bool,  # noqa: FBT001
    choice: Choice,
) -> None:
    assert choose(support, declared, tasks, wants=wants) is choice


def test_a_required_tool_is_refused_if_the_route_says_so() -> None:
    with pytest.raises(TasksUndeclared) as caught:
        choose("required", NONE, REFUSE, wants=False)
    assert caught.value.data == {"requiredCapabilities": {"extensions": {"io.modelcontextprotocol/tasks": {}}}}
