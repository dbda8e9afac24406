"""Findings about device memory."""
