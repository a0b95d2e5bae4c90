"""HTTP as a library would offer it: a client, headers, replies."""
