"""Child processes of stdio servers that serve more than one session."""
