"""stepscope: where each training step went, what to change, what it buys, and proof.

What the interpreter is set to comes before any import that takes time. All errors end here.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys

from stepscope.errors import StepscopeError
from stepscope.ui.job_environment import without_blas_threads


def main() -> None:
    """Run a verb; turn every error into one message and its exit code."""
    without_blas_threads()
    # A verb makes few cycles; looking for them, and again at the end, is a seventh of a short run.
    gc.disable()
    atexit.register(gc.freeze)
    import click

    from stepscope.ui.cli.verbs import cli

    try:
        code = cli.main(standalone_mode=False)
        if sys.stdout is not None:  # closed by whoever started us
            sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        _say("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output left: leave quietly, as other tools do.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except StepscopeError as error:
        _say(*map(str, error.args))
        sys.exit(error.exit_code)
    except Exception as error:
        if os.environ.get("STEPSCOPE_DEBUG"):
            raise
        _say(
            f"a defect in stepscope: {type(error).__name__}: {error}",
            "set STEPSCOPE_DEBUG=1 to see where, and please report it",
        )
        sys.exit(1)


def _say(message: str = "", *more: str) -> None:
    from stepscope.ui.say import say

    say(message, *more)
