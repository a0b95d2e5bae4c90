"""The other replicas: who they are, how to speak to them, which of them serves a retry."""
