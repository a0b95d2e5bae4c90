"""The server's side of the legacy protocol towards legacy clients, without what stands behind it."""
