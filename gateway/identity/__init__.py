"""The identity of a caller, as tokens or headers state it."""
