"""One client intention with all its rounds: a state machine without I/O."""
