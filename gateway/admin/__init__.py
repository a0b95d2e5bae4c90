"""The operator's listener: probes, metrics, status page."""
