"""The child that reads a run for the server: `python -m stepscope.ui.lsp.read_run RUN SCRIPT`.

Its standard output carries one JSON object: {"run": ...} or {"failed": "why"}. Whatever the
libraries print goes to standard error.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from stepscope.errors import StepscopeError


def main() -> None:
    answer = os.dup(1)
    os.dup2(2, 1)
    text = msgspec.json.encode(_read(Path(sys.argv[1]), Path(sys.argv[2])))
    with os.fdopen(answer, "wb") as pipe:
        pipe.write(text)


def _read(run: Path, script: Path) -> dict[str, object]:
    from stepscope.ui.lsp.measured_run import read_measured_run

    try:
        return {"run": read_measured_run(run, script)}
    except StepscopeError as error:
        return {"failed": str(error)}
    except Exception as error:
        return {"failed": f"a defect in stepscope: {type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
