"""Decides whether a tool is called as a task: pure.

The tool, its server, the client and the route each have a say.
"""

from typing import Literal

from gateway.config.model.route import RouteTasks
from gateway.protocol.errors import TasksUndeclared
from gateway.protocol.request_meta import Capabilities

Choice = Literal["plain", "drive", "give"]
"""How a tool is called: without a task, as a task that the gateway drives, or as a task of the client."""


def choose(support: str, declared: Capabilities, tasks: RouteTasks, *, wants: bool) -> Choice:
    """How to call a tool whose server offers tasks; `wants` if a client of 2025-11-25's tasks asks for one.

    `support` is the tool's `execution.taskSupport`. Raises TasksUndeclared.
    """
    if support not in ("optional", "required"):
        return "plain"
    if declared.tasks or (declared.legacy_tasks and wants):
        return "give"
    if support == "optional":
        return "drive" if tasks.optional == "drive" else "plain"
    if tasks.undeclared == "refuse":
        raise TasksUndeclared("This tool runs as a task only, and so its call")
    return "drive"
