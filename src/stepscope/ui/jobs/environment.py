"""Choose the environment and the interpreter of processes that stepscope starts: the user's
own, plus what capture needs.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from stepscope.errors import UnreadableInputError

if TYPE_CHECKING:
    from stepscope.measure.settings import Settings

_BLAS = "OPENBLAS_NUM_THREADS"
INJECT = Path(__file__).parents[2] / "measure" / "inject"
_ours_alone: set[str] = set()


def without_blas_threads() -> None:
    """Turn them off here: this process multiplies no large matrices, and they slow its start."""
    if _BLAS not in os.environ:
        os.environ[_BLAS] = "1"
        _ours_alone.add(_BLAS)


def job_environment(settings: Settings | None, command: Sequence[str] = ()) -> dict[str, str]:
    """A variable holds the settings, and PYTHONPATH leads to the start-up file.

    Without settings the environment is the user's alone.
    """
    users = {name: value for name, value in os.environ.items() if name not in _ours_alone}
    if settings is None:
        return users
    variables = capture_variables(settings, users)
    if starts_deepspeed(command):
        with contextlib.suppress(OSError, UnreadableInputError, UnicodeDecodeError):
            variables |= deepspeed_variables(settings, variables)
    return variables


def capture_variables(settings: Settings, users: Mapping[str, str]) -> dict[str, str]:
    """Return the user's variables, changed so that every Python process finds the start-up file."""
    path = os.pathsep.join(filter(None, [str(INJECT), users.get("PYTHONPATH")]))
    # Torch before 2.13 records no collectives without this.
    defaults = {"TORCH_FR_BUFFER_SIZE": "2000"}
    ours = {**settings.to_environment(), "PYTHONPATH": path}
    if settings.nccl_debug:
        defaults["NCCL_DEBUG_SUBSYS"] = "INIT,ENV,GRAPH,COLL,TUNING"
        ours |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{settings.folder}/nccl.%h.%p.log"}
    variables = {**defaults, **users, **ours}
    if settings.remedies:
        from stepscope.fix.named_changes import choose_all, environment, with_changes

        changes = environment(choose_all(settings.remedies), variables)
        variables = with_changes(variables, changes)
    return variables


# DeepSpeed's launcher carries few variables to other hosts, and those that a file of its holds.
#
# The file is `.deepspeed_env` in the home folder or here, or what DS_ENV_FILE names. `run` gives it
# a file of its own, with the user's lines and ours. The lines may hold API keys and run folders are
# shared: the file lies elsewhere, only its owner can read it, and it is removed with our process.

_VARIABLE, _USUAL_NAME = "DS_ENV_FILE", ".deepspeed_env"
DEEPSPEED = ("deepspeed", "deepspeed.pt", "deepspeed.launcher.runner")
SCRIPT = re.compile(r".+\.(py|sh)")


def starts_deepspeed(command: Sequence[str]) -> bool:
    """And lets it reach other hosts. Accelerate writes such a file itself, with all variables."""
    for word in command:
        name = PurePath(word).name
        if name in DEEPSPEED:
            return "--no_ssh" not in command
        if SCRIPT.fullmatch(word) or name == "accelerate":
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
    """Yield the lines of the files that DeepSpeed would have read, in its order."""
    from stepscope.trace.files import read_whole  # few commands need it, and --help stays instant

    name = environment.get(_VARIABLE, _USUAL_NAME)
    files = [Path.home() / name, Path.cwd() / name]
    for file in dict.fromkeys(file for file in files if file.is_file()):
        yield from (f"{line}\n" for line in read_whole(file).decode().splitlines())


def _own_lines(settings: Settings, environment: Mapping[str, str]) -> Iterator[str]:
    for name, value in settings.to_environment(plain=True).items():
        yield f"{name}={value}\n"
    name = "TORCH_FR_BUFFER_SIZE"
    if name in environment:
        yield f"{name}={environment[name]}\n"


# How stepscope starts a Python process of its own.
#
# Never with the current folder on the module search path: a json.py that lies there must not run
# because somebody opened a file, started a server or explained a run.


def own_python(module: str, *arguments: str) -> list[str]:
    """Return the command that runs one of our modules, or torch's launcher, with this Python."""
    return [sys.executable, "-P", "-m", module, *arguments]


def own_ranks(ranks: int, module: str, *arguments: str) -> list[str]:
    """Return the command that runs one of our modules on several ranks of this machine."""
    launcher = own_python("torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return [*launcher, "--no-python", *own_python(module, *arguments)]


def startable(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command to start: `train.py` alone means `python train.py`, with this Python."""
    script = Path(command[0])
    if script.suffix == ".py" and script.is_file() and not os.access(script, os.X_OK):
        return (sys.executable, *command)
    return command
