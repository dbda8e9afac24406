"""How stepscope starts a Python process of its own.

Never with the current folder on the module search path: a json.py that lies there must not run
because somebody opened a file, started a server or explained a run.
"""

from __future__ import annotations

import sys


def own_python(module: str, *arguments: str) -> list[str]:
    """Return the command that runs one of our modules, or torch's launcher, with this Python."""
    return [sys.executable, "-P", "-m", module, *arguments]


def own_ranks(ranks: int, module: str, *arguments: str) -> list[str]:
    """Return the command that runs one of our modules on several ranks of this machine."""
    launcher = own_python("torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return [*launcher, "--no-python", *own_python(module, *arguments)]
