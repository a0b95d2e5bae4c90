"""The transports over HTTP towards legacy servers."""
