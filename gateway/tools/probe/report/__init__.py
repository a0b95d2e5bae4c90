"""The report of a probe: as structs, as text, as suggested configuration."""
