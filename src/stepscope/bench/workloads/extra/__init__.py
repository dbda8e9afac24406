"""Workloads outside the suite: run by name, or all of them with `bench --all`."""
