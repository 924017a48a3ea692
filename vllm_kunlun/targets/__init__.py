"""Device drivers, one package per target: memory, threads, and what the target can do."""
