"""Costs of a training step by line of the user's code."""

from stepscope.explain.lines.costs import KeptBytes, cost_lines

__all__ = ["KeptBytes", "cost_lines"]
