"""Every step of a run, not only those of the profiler's window: what a step costs on average."""
