"""stepscope: where each training step went, what to change, what it buys, and proof.

The interpreter is set up before any slow import. Every error ends here.
"""

from __future__ import annotations

import os
import sys

from stepscope.errors import StepscopeError
from stepscope.ui.job_environment import without_blas_threads


def main() -> None:
    """Run a verb; every error becomes one message and an exit code."""
    without_blas_threads()
    import click

    from stepscope.ui.cli.verbs import COMPLETE, cli
    from stepscope.ui.say import leave_quietly, say

    try:
        code = cli.main(standalone_mode=False, complete_var=COMPLETE)
        if sys.stdout is not None:  # None if it was closed before we started
            sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        say("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        leave_quietly()
    except StepscopeError as error:
        say(*map(str, error.args or ("",)))
        sys.exit(error.exit_code)
    except Exception as error:
        if os.environ.get("STEPSCOPE_DEBUG"):
            raise
        say(
            f"a defect in stepscope: {type(error).__name__}: {error}",
            "set STEPSCOPE_DEBUG=1 to see where, and please report it",
        )
        sys.exit(1)
