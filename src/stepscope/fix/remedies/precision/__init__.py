"""Compute in fewer bits."""
