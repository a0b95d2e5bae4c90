"""The pure core: no I/O, no clock, no async; everything here is a function of its arguments."""
