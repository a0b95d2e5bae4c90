"""Reads single values of metrics."""

from prometheus_client import CollectorRegistry


def value_in(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    """The value of one series of mcp_gateway_NAME; None if there is no such series."""
    return registry.get_sample_value(f"mcp_gateway_{name}", labels)
