"""What an operator asks of a process: probes, metrics, status page, reloads."""
