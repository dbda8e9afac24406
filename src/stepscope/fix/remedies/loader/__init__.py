"""Batches that are ready when the training asks for them."""
