"""Findings about ranks that work together: collectives, stragglers, NCCL, the parameter server."""
