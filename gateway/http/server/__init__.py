"""The server half of HTTP/1, within the limits of the configuration."""
