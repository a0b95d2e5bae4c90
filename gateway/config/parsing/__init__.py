"""The way from YAML text to structs."""
