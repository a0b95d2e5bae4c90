"""The steps of a probe, each asking a server one kind of question."""
