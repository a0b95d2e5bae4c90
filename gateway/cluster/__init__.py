"""The other replicas: membership, messages between replicas, routing of retries."""
