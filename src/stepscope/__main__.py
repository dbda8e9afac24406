"""The command `stepscope`, and python -m stepscope."""

from __future__ import annotations

import os
import sys


def run() -> None:
    """Run the command line. The first page loads none of it: it takes a third of the time."""
    if sys.argv[1:] in (["--help"], ["-h"]) and "_STEPSCOPE_COMPLETE" not in os.environ:
        from stepscope.ui.front_page import print_front_page

        as_module = __name__ == "__main__"
        try:
            print_front_page("python -m stepscope" if as_module else os.path.basename(sys.argv[0]))  # noqa: PTH119
            return
        except (AttributeError, OSError):  # nobody reads it: `main` knows what to do then
            pass
    from stepscope.ui.cli.verbs import main

    main()


if __name__ == "__main__":
    run()
