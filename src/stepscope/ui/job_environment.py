"""The environment of a job that stepscope starts: the user's own, plus what capture needs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import UnreadableInputError
from stepscope.ui.deepspeed_environment import deepspeed_variables, starts_deepspeed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stepscope.measure.settings import Settings

_BLAS = "OPENBLAS_NUM_THREADS"
INJECT = Path(__file__).parents[1] / "measure" / "inject"
_ours_alone: set[str] = set()


def without_blas_threads() -> None:
    """In this process only: it multiplies no large matrices, and threads slow its start."""
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
    """The user's variables, changed so that every Python process finds the start-up file."""
    path = os.pathsep.join(filter(None, [str(INJECT), users.get("PYTHONPATH")]))
    # Torch before 2.13 records no collectives without this.
    defaults = {"TORCH_FR_BUFFER_SIZE": "2000"}
    ours = {**settings.to_environment(), "PYTHONPATH": path}
    if settings.nccl_debug:
        defaults["NCCL_DEBUG_SUBSYS"] = "INIT,ENV,GRAPH,COLL,TUNING"
        ours |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{settings.folder}/nccl.%h.%p.log"}
    variables = {**defaults, **users, **ours}
    if settings.remedies:
        from stepscope.fix.chosen import choose_all, environment, with_changes

        changes = environment(choose_all(settings.remedies), variables)
        variables = with_changes(variables, changes)
    return variables
