"""Bytes by category in one training step, read without touching the training."""
