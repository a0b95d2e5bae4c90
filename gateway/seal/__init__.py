"""Sealed content: requestState, handoff to another process, messages between replicas."""
