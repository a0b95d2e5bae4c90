"""A modern request carried to a legacy server, its result carried back."""
