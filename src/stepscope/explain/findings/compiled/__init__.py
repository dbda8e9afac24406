"""Findings about torch.compile."""
