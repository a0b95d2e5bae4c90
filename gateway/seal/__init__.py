"""requestState: what it carries, how it is sealed."""
