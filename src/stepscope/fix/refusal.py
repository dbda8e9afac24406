"""How a remedy says that it does not fit a training."""

from __future__ import annotations


class RefusedError(Exception):
    """A remedy that does not fit this training; the message says why."""
