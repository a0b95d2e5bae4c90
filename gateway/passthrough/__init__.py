"""Requests that are forwarded as they came."""
