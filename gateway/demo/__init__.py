"""Demonstrates the gateway between an unmodified legacy server and an unmodified modern client."""
