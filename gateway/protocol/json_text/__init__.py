"""JSON texts before they are decoded."""
