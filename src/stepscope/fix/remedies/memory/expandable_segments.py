"""Segments of device memory that grow, instead of new ones beside holes: expandable_segments."""

from __future__ import annotations

import os
from collections.abc import Mapping

from stepscope.fix.declaration import Effect, Fix
from stepscope.fix.proposal import Proposal, Script, add_setting, first_set
from stepscope.records.script_facts import ScriptFacts

# torch 2.9 prefers the first name; every version reads the second.
_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_SETTING = "expandable_segments"


def fits(facts: ScriptFacts, value: str) -> str | None:
    if facts.device != "cuda":
        return "it needs a CUDA device"
    settings = facts.variables.get(first_set(facts.variables, *_NAMES) or "", "")
    if f"{_SETTING}:True" in settings.replace(" ", ""):
        return "segments are expandable already"
    if "backend:cudaMallocAsync" in settings.replace(" ", ""):
        return "cudaMallocAsync has no segments"
    return None


def environment(value: str, variables: Mapping[str, str]) -> dict[str, str | None]:
    """The user's other settings stay."""
    name = first_set(variables, *_NAMES) or _NAMES[1]
    return {name: add_setting(variables.get(name, ""), _SETTING, "True")}


def patch(script: Script, value: str) -> Proposal:
    users = {name: os.environ[name] for name in _NAMES if name in os.environ}
    changes = environment(value, users)
    return Proposal(variables={name: text for name, text in changes.items() if text is not None})


FIX = Fix(
    id="expandable-segments",
    effect=Effect.BIT_IDENTICAL,
    fits=fits,
    environment=environment,
    patch=patch,
)
