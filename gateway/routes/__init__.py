"""The configured routes at work, with the calls that are parked on them."""
