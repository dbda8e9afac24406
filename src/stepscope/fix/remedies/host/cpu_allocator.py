"""Another allocator of host memory, loaded before the program: tcmalloc or jemalloc."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import RefusedError
from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script, add_path
from stepscope.records.processors import loaded_libraries
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess

_VARIABLE = "LD_PRELOAD"
# Allocator -> its files, best first, and the packages that have them.
_FILES = {
    "tcmalloc": ("libtcmalloc_minimal.so*", "libtcmalloc.so*"),
    "jemalloc": ("libjemalloc.so*",),
}
_PACKAGES = {
    "tcmalloc": "apt install libtcmalloc-minimal4, or conda install gperftools",
    "jemalloc": "apt install libjemalloc2, or conda install jemalloc",
}
_FOLDERS = ("/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib", "/lib64")


def find_library(name: str) -> str | None:
    """Its file on this machine; an environment of conda comes first."""
    conda = os.environ.get("CONDA_PREFIX")
    folders = [f"{conda}/lib"] if conda else []
    for folder in (*folders, *_FOLDERS):
        for pattern in _FILES[name]:
            files = sorted(Path("/").glob(f"{folder.lstrip('/')}/{pattern}"))
            if files:
                return str(files[0])
    return None


def fits(facts: ScriptFacts, value: str) -> str | None:
    if facts.device != "cpu":
        return "the model is not on the CPU"
    if any(name in facts.variables.get(_VARIABLE, "") for name in _FILES):
        return f"another allocator is loaded already ({_VARIABLE})"
    if find_library(value) is None:
        return f"{value} is not installed here: {_PACKAGES[value]}"
    return None


def environment(value: str, variables: Mapping[str, str]) -> dict[str, str | None]:
    library = find_library(value)
    if library is None:
        return {}
    return {_VARIABLE: add_path(variables.get(_VARIABLE, ""), library)}


def apply(training: TrainingProcess, value: str) -> None:
    if f"lib{value}" not in loaded_libraries():
        library = find_library(value)
        if library is None:
            raise RefusedError(f"{value} is not installed here: {_PACKAGES[value]}")
        raise RefusedError(f"{library} was not loaded into this process ({_VARIABLE})")
    training.did(f"CPU memory comes from {value}")


def patch(script: Script, value: str) -> Proposal:
    library = find_library(value)
    if library is None:
        return Proposal(by_hand=(f"install {value} ({_PACKAGES[value]}) and set {_VARIABLE}",))
    return Proposal(variables={_VARIABLE: add_path(os.environ.get(_VARIABLE, ""), library)})


FIX = Fix(
    id="cpu-allocator",
    effect=Effect.BIT_IDENTICAL,
    values=("tcmalloc", "jemalloc"),
    accepts=lambda value: value in _FILES,
    fits=fits,
    apply=apply,
    environment=environment,
    patch=patch,
)
