"""Findings about the training loop around the step: input, stalls, evaluation, checkpoints,
start-up.
"""
