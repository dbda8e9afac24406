"""Where `serve` keeps files of its own: never inside run folders.

What can be made again (the index, pages) is in the user's cache folder; tags, which somebody typed,
are in the configuration folder. Both have one folder per served folder.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from stepscope.errors import UsageError
from stepscope.records.user_folders import user_folder

if TYPE_CHECKING:
    from pathlib import Path


def cache_folder(root: Path) -> Path:
    """For what can be made again."""
    home = user_folder("STEPSCOPE_CACHE_DIR", "", "XDG_CACHE_HOME", "~/.cache")
    return _made(home / "serve" / _name(root))


def tags_file(root: Path) -> Path:
    """$STEPSCOPE_TAGS names another folder for the files of all served folders."""
    return _made(user_folder("STEPSCOPE_TAGS", "tags")) / f"{_name(root)}.json"


def _name(root: Path) -> str:
    return hashlib.blake2b(os.fsencode(root), digest_size=8).hexdigest()


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be made: {error.strerror}",
            "STEPSCOPE_CACHE_DIR and STEPSCOPE_TAGS name other folders for serve's own files",
        ) from None
    return folder
