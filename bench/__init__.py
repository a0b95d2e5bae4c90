"""Benchmarks of the gateway as ratios to named anchors measured in the same run."""
