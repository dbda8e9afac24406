"""Findings about the host: launches, Python, threads, other processes, the profiler."""
