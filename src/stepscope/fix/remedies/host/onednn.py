"""oneDNN's kernels where a script has turned them off: torch.backends.mkldnn.enabled."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script
from stepscope.fix.python_source import Edit, PythonSource
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_process import TrainingProcess

_NAME = "torch.backends.mkldnn"


def fits(facts: ScriptFacts, value: str) -> str | None:
    if facts.device != "cpu":
        return "the model is not on the CPU"
    if facts.onednn is None:
        return "this torch was built without oneDNN"
    return "oneDNN is on already" if facts.onednn else None


def apply(training: TrainingProcess, value: str) -> None:
    """At every forward: the script may turn it off again for each step."""
    import torch

    tell = training.telling()

    def switch(_module: Any, _args: Sequence[Any], _kwargs: dict[str, Any]) -> None:
        if not torch.backends.mkldnn.enabled:
            torch._C._set_mkldnn_enabled(True)
            tell("oneDNN is on")

    training.around_root(switch)


def patch(script: Script, value: str) -> Proposal:
    """Where the script turns it off: an assignment, or a `with flags(enabled=False)`."""
    files = dict.fromkeys(frame.file for frame in script.facts.forward)
    sources = filter(None, map(script.source, files))
    edits = tuple(edit for source in sources for edit in _edits(source))
    if edits:
        return Proposal(edits=edits)
    return Proposal(by_hand=(f"set {_NAME}.enabled = True, because something turns it off",))


def _edits(source: PythonSource) -> Iterator[Edit]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign):
            targets = [source.segment(target) for target in node.targets]
            if any(target.endswith("mkldnn.enabled") for target in targets):
                yield source.replace(node.value, "True")
        elif isinstance(node, ast.Call) and source.segment(node.func).endswith("mkldnn.flags"):
            edit = source.set_keyword(node, "enabled", "True", 0)
            if edit is not None:
                yield edit


FIX = Fix(id="onednn", effect=Effect.ROUNDING, fits=fits, apply=apply, patch=patch)
