"""Every error stepscope raises on purpose, and the exit code each one ends with.

    StepscopeError              1   a defect of ours, or anything not listed below
    ├── UsageError              2   the command was called wrongly
    ├── UnreadableInputError    3   a file could not be read as what it should be
    ├── NotCapturedError        4   the input is fine but does not hold what was asked for
    │   └── NotPredictedError   4   the step takes none of the changes that were asked for
    └── SlowerError             5   B is slower than --fail-on-slower allows; nothing went wrong

Two more end no command: RefusedError says why a change does not fit a training, and
TrainingStopped (6) ends a training that must not go on. `run --on-hang end` ends a job that hangs
with exit code 7.

A message says what happened, where, and what to do; further arguments are lines that stand below
it. They are caught once, in ui/cli.
"""

from __future__ import annotations

import sys

HANG_ENDED = 7  # the exit code of a job that hung, and was ended because the user asked for it


class StepscopeError(Exception):
    """Base of all errors; carries the process's exit code, and its kind in `cannot_answer`."""

    exit_code = 1
    kind = "defect"


class UsageError(StepscopeError):
    """The command or the call itself was wrong."""

    exit_code = 2
    kind = "wrong-use"


class UnreadableInputError(StepscopeError):
    """An input file is missing, not permitted, or holds nothing readable."""

    exit_code = 3
    kind = "unreadable"


class NotCapturedError(StepscopeError):
    """The input was read, but what the question needs was never recorded."""

    exit_code = 4
    kind = "not-captured"


class NotPredictedError(NotCapturedError):
    """Every change that was asked for refuses this step; the message says why."""

    kind = "refused"


class SlowerError(StepscopeError):
    """The answer was given, and it is one that the caller wanted to be stopped by."""

    exit_code = 5


class RefusedError(Exception):
    """A change that does not fit this training; the message says why."""


class TrainingStopped(SystemExit):
    """Ends this process: to train on would train something else.

    It is no Exception: a script's own `except Exception` must not catch it and train on.
    """

    exit_code = 6

    def __init__(self, why: str) -> None:
        super().__init__(self.exit_code)
        self.why = why
        sys.stderr.write(f"stepscope: the training was stopped: {why}\n")
