"""The metrics, each declared once."""
