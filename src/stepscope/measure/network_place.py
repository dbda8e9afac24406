"""Rack and switch of this host, from the environment: Slurm's topology, or the user's own words.

Slurm sets both variables when a topology plugin is configured:

    SLURM_TOPOLOGY_ADDR=s0.s2.node1
    SLURM_TOPOLOGY_ADDR_PATTERN=switch.switch.node
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_LONGEST = 200  # of a name, and of all switches: more is no topology


def network_place(environment: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """None if nothing tells. STEPSCOPE_RACK and STEPSCOPE_SWITCH outrank Slurm's names."""
    switches = _slurm_switches(environment)
    rack = _name(environment, "STEPSCOPE_RACK")
    switch = _name(environment, "STEPSCOPE_SWITCH")
    if switch and switch not in switches[-1:]:
        switches = [switch]
    if not rack and not switches:
        return None
    return {"rack": rack, "switch": switches[-1] if switches else None, "switches": switches}


def _slurm_switches(environment: Mapping[str, str]) -> list[str]:
    """From the top down; a node's name may contain dots, a switch's may not."""
    kinds = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")[:_LONGEST].split(".")
    names = environment.get("SLURM_TOPOLOGY_ADDR", "")[:_LONGEST].split(".", len(kinds) - 1)
    if len(names) != len(kinds):
        return []
    pairs = zip(names, kinds, strict=True)
    return [name for name, kind in pairs if kind == "switch" and name]


def _name(environment: Mapping[str, str], variable: str) -> str | None:
    return environment.get(variable, "").strip()[:_LONGEST] or None
