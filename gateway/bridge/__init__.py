"""A modern request carried to a legacy server and its result carried back."""
