"""Parsing: from YAML text to structs."""
