"""The operator's listener: probes, metrics and the status page."""
