"""The report of a probe, as structs, text and suggested configuration."""
