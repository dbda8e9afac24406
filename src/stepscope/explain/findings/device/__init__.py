"""Findings about the device's kernels and copies."""
