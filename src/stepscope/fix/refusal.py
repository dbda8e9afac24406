"""How a remedy says that it does not fit a training, or that the training must not go on."""

from __future__ import annotations

import sys

EXIT_CODE = 6  # docs/reference/json.md lists it


class RefusedError(Exception):
    """A remedy that does not fit this training; the message says why."""


class TrainingStopped(SystemExit):
    """Ends this process: to train on would train something else.

    It is no Exception: a script's own `except Exception` must not catch it and train on.
    """

    def __init__(self, why: str) -> None:
        super().__init__(EXIT_CODE)
        self.why = why
        sys.stderr.write(f"stepscope: the training was stopped: {why}\n")
