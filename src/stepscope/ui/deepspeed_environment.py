"""DeepSpeed's launcher carries few variables to other hosts, and those that a file of its holds.

The file is `.deepspeed_env` in the home folder or here, or what DS_ENV_FILE names. `run` gives it a
file of its own, with the user's lines and ours. The lines may hold API keys and run folders are
shared: the file lies elsewhere, only its owner can read it, and it is removed with our process.
"""

from __future__ import annotations

import atexit
import os
import re
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from stepscope.trace.regular_files import read_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from stepscope.measure.settings import Settings

_VARIABLE, _USUAL_NAME = "DS_ENV_FILE", ".deepspeed_env"
_LAUNCHERS = ("deepspeed", "deepspeed.pt", "deepspeed.launcher.runner")
_SCRIPT = re.compile(r".+\.(py|sh)")


def starts_deepspeed(command: Sequence[str]) -> bool:
    """And lets it reach other hosts. Accelerate writes such a file itself, with all variables."""
    for word in command:
        name = PurePath(word).name
        if name in _LAUNCHERS:
            return "--no_ssh" not in command
        if _SCRIPT.fullmatch(word) or name == "accelerate":
            return False
    return False


def deepspeed_variables(settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    """Write the file; return the variable that names it.

    OSError, UnreadableInputError or UnicodeDecodeError if that fails.
    """
    import tempfile

    text = "".join([*_users_lines(environment), *_own_lines(settings, environment)])
    handle, name = tempfile.mkstemp(prefix="stepscope-deepspeed-", suffix=".env")
    atexit.register(Path(name).unlink, missing_ok=True)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    return {_VARIABLE: name}


def _users_lines(environment: Mapping[str, str]) -> Iterator[str]:
    """Of the files that DeepSpeed would have read, in its order."""
    name = environment.get(_VARIABLE, _USUAL_NAME)
    files = [Path.home() / name, Path.cwd() / name]
    for file in dict.fromkeys(file for file in files if file.is_file()):
        yield from (f"{line}\n" for line in read_whole(file).decode().splitlines())


def _own_lines(settings: Settings, environment: Mapping[str, str]) -> Iterator[str]:
    # DeepSpeed puts the lines on command lines of other hosts, where no `run --collect` waits.
    settings = replace(settings, collect_port=0, collect_token="")
    for name, value in settings.to_environment(plain=True).items():
        yield f"{name}={value}\n"
    name = "TORCH_FR_BUFFER_SIZE"
    if name in environment:
        yield f"{name}={environment[name]}\n"
