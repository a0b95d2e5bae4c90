"""HTTP as a library would offer it: a client, a listener, headers, replies."""
