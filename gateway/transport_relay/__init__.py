"""Relays the sessions of legacy clients to legacy servers that speak another transport."""
