"""Backward graphs as capture writes them, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from stepscope.records.memory import CapturedBackward

FLOAT = "float32"
NET = (["", "Net", 1, False],)


def graph_of(
    nodes: Sequence[Any], storages: Sequence[Any] = (), modules: Sequence[Any] = NET
) -> CapturedBackward:
    """Nodes are [name, module, outputs, inputs, saved]; storages [bytes, kind]."""
    content = {"modules": modules, "storages": storages, "nodes": nodes, "hidden": 0}
    return msgspec.convert(content, CapturedBackward)
