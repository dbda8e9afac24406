"""The suite: one file for each workload."""
