"""The pool of a route's sessions: which request gets which session, when one is opened."""
