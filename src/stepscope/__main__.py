"""The command `stepscope`, and python -m stepscope."""

import atexit
import os
import sys
from contextlib import suppress

from stepscope.ui.cli.main import main


def run() -> None:
    """Run a verb, then leave at once."""
    try:
        main()
    except SystemExit as exit_:
        _leave(exit_.code)
        raise


def _leave(code: object) -> None:
    """End the process without taking every module apart, which is a twentieth of a short run.

    Exit handlers run and output is flushed, as at any end. With threads still at work Python
    itself ends the process.
    """
    import threading

    if threading.active_count() > 1 or not isinstance(code, int):
        return
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or gone
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
