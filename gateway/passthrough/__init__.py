"""Requests that pass through unchanged."""
