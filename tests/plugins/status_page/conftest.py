"""Fixtures: the replicas whose status pages show each other."""

from tests.cluster.conftest import cluster, hole

__all__ = ["cluster", "hole"]
