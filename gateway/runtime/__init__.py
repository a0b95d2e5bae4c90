"""Background tasks with their timers: the ground of every asynchronous folder."""
