"""Traces by OpenTelemetry, for `traces: true`."""
