"""The status page, for processes that somebody can ask for it."""
