"""Fixtures: the environment in which traces are set up."""

from tests.telemetry.conftest import environment

__all__ = ["environment"]
