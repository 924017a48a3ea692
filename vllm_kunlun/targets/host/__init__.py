"""Driver of the host target: memory and threads of a plain x86 CPU."""
