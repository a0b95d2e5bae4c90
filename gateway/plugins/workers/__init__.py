"""Several processes on one host, for `workers` above 1."""
