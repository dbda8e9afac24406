"""Where stepscope keeps files of its own for this user, and under which host's name."""

from __future__ import annotations

import os
from pathlib import Path


def user_folder(
    variable: str, name: str, base_variable: str = "XDG_CONFIG_HOME", usual: str = "~/.config"
) -> Path:
    """The folder that an environment variable names, else one in the user's configuration."""
    if chosen := os.environ.get(variable):
        return Path(chosen)
    try:
        base = Path(os.environ.get(base_variable) or Path(usual).expanduser())
    except RuntimeError:  # a user without a home, as in some containers
        import tempfile

        base = Path(tempfile.gettempdir())
    return base / "stepscope" / name


def this_host() -> str:
    """The name that files of this machine carry."""
    import platform

    return platform.node()
