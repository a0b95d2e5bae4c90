"""The upstream sessions of a route: opened, pooled, shared, checked, closed."""
