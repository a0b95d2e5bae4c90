"""The identity of a caller, as tokens and headers state it."""
