"""The structs of the configuration: every key with its type, range, default, meaning."""
