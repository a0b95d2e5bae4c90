"""The exchange: a state machine, without I/O, for one client call with all its rounds."""
