"""The host's allocators, arithmetic and garbage collection."""

from __future__ import annotations

import ast
import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.errors import RefusedError
from stepscope.fix.declaration import Fix
from stepscope.fix.proposal import Proposal, Script, add_path, add_setting, first_set
from stepscope.fix.python_source import Edit, PythonSource
from stepscope.records.processors import loaded_libraries
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess


# Another allocator of host memory, loaded before the program: tcmalloc or jemalloc.

_PRELOAD = "LD_PRELOAD"
# Allocator -> its files, best first, and the packages that have them.
_LIBRARIES = {
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
        for pattern in _LIBRARIES[name]:
            files = sorted(Path("/").glob(f"{folder.lstrip('/')}/{pattern}"))
            if files:
                return str(files[0])
    return None


def _why_not_cpu_allocator(facts: ScriptFacts, value: str) -> str | None:
    if facts.device != "cpu":
        return "the model is not on the CPU"
    if any(name in facts.variables.get(_PRELOAD, "") for name in _LIBRARIES):
        return f"another allocator is loaded already ({_PRELOAD})"
    if find_library(value) is None:
        return f"{value} is not installed here: {_PACKAGES[value]}"
    return None


def _environment_cpu_allocator(value: str, variables: Mapping[str, str]) -> dict[str, str | None]:
    library = find_library(value)
    if library is None:
        return {}
    return {_PRELOAD: add_path(variables.get(_PRELOAD, ""), library)}


def _apply_cpu_allocator(training: TrainingProcess, value: str) -> None:
    if f"lib{value}" not in loaded_libraries():
        library = find_library(value)
        if library is None:
            raise RefusedError(f"{value} is not installed here: {_PACKAGES[value]}")
        raise RefusedError(f"{library} was not loaded into this process ({_PRELOAD})")
    training.did(f"CPU memory comes from {value}")


def _patch_cpu_allocator(script: Script, value: str) -> Proposal:
    library = find_library(value)
    if library is None:
        return Proposal(by_hand=(f"install {value} ({_PACKAGES[value]}) and set {_PRELOAD}",))
    return Proposal(variables={_PRELOAD: add_path(os.environ.get(_PRELOAD, ""), library)})


CPU_ALLOCATOR = Fix(
    accepts=lambda value: value in _LIBRARIES,
    fits=_why_not_cpu_allocator,
    apply=_apply_cpu_allocator,
    environment=_environment_cpu_allocator,
    patch=_patch_cpu_allocator,
)


# Values too small for a full mantissa become 0: CPUs compute with them many times slower.

_FLUSH = "torch.set_flush_denormal(True)"


def _why_not_flush_denormal(facts: ScriptFacts, value: str) -> str | None:
    if facts.device != "cpu":
        return "the model is not on the CPU"
    if facts.flushes_denormals:
        return "denormal values are 0 already"
    return None


def _apply_flush_denormal(training: TrainingProcess, value: str) -> None:
    """Before torch starts its threads: each takes the mode over from the one that starts it."""
    import torch

    if not torch.set_flush_denormal(True):
        raise RefusedError("this processor cannot")
    training.did("denormal values are 0")


def _patch_flush_denormal(script: Script, value: str) -> Proposal:
    found = script.source_of(script.facts.forward[::-1])
    if found is None:
        return Proposal(by_hand=(f"before training: {_FLUSH}",))
    source, _ = found
    return Proposal(edits=(*source.ensure_import("torch"), source.insert_after_imports(_FLUSH)))


FLUSH_DENORMAL = Fix(
    fits=_why_not_flush_denormal, apply=_apply_flush_denormal, patch=_patch_flush_denormal
)


# oneDNN's kernels where a script has turned them off: torch.backends.mkldnn.enabled.

_ONEDNN_SWITCH = "torch.backends.mkldnn"


def _why_not_onednn(facts: ScriptFacts, value: str) -> str | None:
    if facts.device != "cpu":
        return "the model is not on the CPU"
    if facts.onednn is None:
        return "this torch was built without oneDNN"
    return "oneDNN is on already" if facts.onednn else None


def _apply_onednn(training: TrainingProcess, value: str) -> None:
    """At every forward: the script may turn it off again for each step."""
    import torch

    tell = training.telling()

    def switch(_module: Any, _args: Sequence[Any], _kwargs: dict[str, Any]) -> None:
        if not torch.backends.mkldnn.enabled:
            torch._C._set_mkldnn_enabled(True)
            tell("oneDNN is on")

    training.around_root(switch)


def _patch_onednn(script: Script, value: str) -> Proposal:
    """Where the script turns it off: an assignment, or a `with flags(enabled=False)`."""
    files = dict.fromkeys(frame.file for frame in script.facts.forward)
    sources = filter(None, map(script.source, files))
    edits = tuple(edit for source in sources for edit in _onednn_edits(source))
    if edits:
        return Proposal(edits=edits)
    return Proposal(
        by_hand=(f"set {_ONEDNN_SWITCH}.enabled = True, because something turns it off",)
    )


def _onednn_edits(source: PythonSource) -> Iterator[Edit]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign):
            targets = [source.segment(target) for target in node.targets]
            if any(target.endswith("mkldnn.enabled") for target in targets):
                yield source.replace(node.value, "True")
        elif isinstance(node, ast.Call) and source.segment(node.func).endswith("mkldnn.flags"):
            edit = source.set_keyword(node, "enabled", "True", 0)
            if edit is not None:
                yield edit


ONEDNN = Fix(fits=_why_not_onednn, apply=_apply_onednn, patch=_patch_onednn)


# The widest vectors that the processor has, where ATEN_CPU_CAPABILITY asks for narrower ones.

_CAPABILITY = "ATEN_CPU_CAPABILITY"


def _why_not_vectors(facts: ScriptFacts, value: str) -> str | None:
    if not facts.variables.get(_CAPABILITY):
        return f"{_CAPABILITY} is not set, so torch already uses the widest vectors"
    if facts.device != "cpu":
        return "the model is not on the CPU"
    return None


def _environment_vectors(value: str, variables: Mapping[str, str]) -> dict[str, str | None]:
    return {_CAPABILITY: None}


def _apply_vectors(training: TrainingProcess, value: str) -> None:
    """A script may set it before it imports torch, which reads it at the first operator."""
    if os.environ.pop(_CAPABILITY, None) is not None:
        training.did(f"{_CAPABILITY} is unset")


def _patch_vectors(script: Script, value: str) -> Proposal:
    return Proposal(
        by_hand=(f"unset {_CAPABILITY} where the command is started, or the script sets it",)
    )


VECTORS = Fix(
    fits=_why_not_vectors,
    apply=_apply_vectors,
    environment=_environment_vectors,
    patch=_patch_vectors,
)


# Segments of device memory that grow, instead of new ones beside holes: expandable_segments.

# torch 2.9 prefers the first name; every version reads the second.
_ALLOC_CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_SEGMENTS = "expandable_segments"


def _why_not_expandable_segments(facts: ScriptFacts, value: str) -> str | None:
    if facts.device != "cuda":
        return "it needs a CUDA device"
    settings = facts.variables.get(first_set(facts.variables, *_ALLOC_CONF) or "", "")
    if f"{_SEGMENTS}:True" in settings.replace(" ", ""):
        return "segments are expandable already"
    if "backend:cudaMallocAsync" in settings.replace(" ", ""):
        return "cudaMallocAsync has no segments"
    return None


def _environment_expandable_segments(
    value: str, variables: Mapping[str, str]
) -> dict[str, str | None]:
    """The user's other settings stay."""
    name = first_set(variables, *_ALLOC_CONF) or _ALLOC_CONF[1]
    return {name: add_setting(variables.get(name, ""), _SEGMENTS, "True")}


def _patch_expandable_segments(script: Script, value: str) -> Proposal:
    users = {name: os.environ[name] for name in _ALLOC_CONF if name in os.environ}
    changes = _environment_expandable_segments(value, users)
    return Proposal(variables={name: text for name, text in changes.items() if text is not None})


EXPANDABLE_SEGMENTS = Fix(
    fits=_why_not_expandable_segments,
    environment=_environment_expandable_segments,
    patch=_patch_expandable_segments,
)


# Garbage collections skip what model and data are made of: gc.freeze() after the first steps.

_GC_STEPS = 5  # by then optimizer states, caches and workers exist
_GC_LINES = ("gc.collect()", "gc.freeze()")


def _why_not_gc_freeze(facts: ScriptFacts, value: str) -> str | None:
    if not facts.collects:
        return "garbage collection is off, or its objects are frozen already"
    return None


def _apply_gc_freeze(training: TrainingProcess, value: str) -> None:
    tell, refuse = training.telling(), training.refusing()
    steps = 0

    def count(_optimizer: Any) -> None:
        nonlocal steps
        steps += 1
        if steps != _GC_STEPS:
            return
        if not gc.isenabled():
            refuse("the script has turned garbage collection off")
            return
        gc.collect()
        gc.freeze()
        tell(f"froze all objects that existed after {_GC_STEPS} steps")

    training.after_step(count)


def _patch_gc_freeze(script: Script, value: str) -> Proposal:
    """Before the outermost loop of the function that steps."""
    for _, source, statement in script.statements(script.facts.step):
        loops = source.loops_around(statement)
        if loops:
            imports = source.ensure_import("gc")
            return Proposal(edits=(*imports, source.insert_before(loops[-1], *_GC_LINES)))
    return Proposal(by_hand=("before the training loop: import gc; " + "; ".join(_GC_LINES),))


GC_FREEZE = Fix(fits=_why_not_gc_freeze, apply=_apply_gc_freeze, patch=_patch_gc_freeze)
