"""Traces of a made training step: layers of equal linear products, a backward, an optimizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_UPDATES = {
    "loop": ("aten::addcdiv_",),
    "foreach": ("aten::_foreach_lerp_", "aten::_foreach_addcdiv_"),
    "fused": ("aten::_foreach_add_", "aten::_fused_adam_"),
    "plain": ("aten::add_",),
}


def write_trace(
    rank: Path,
    *,
    batch: int = 8,
    width: int = 16,
    layers: int = 2,
    dtype: str = "float",
    optimizer: str = "loop",
    again: int = 0,  # products of forward that backward computes once more
    passes: int = 1,  # micro-batches a step
    steps: int = 3,
    compiled: bool = False,
) -> None:
    """As the profiler writes one, in a rank's folder."""
    calls: list[tuple[str, list[Any], list[str]]] = []
    products = ([[batch, width], [width, width]], [dtype, dtype])
    gradient = ([[width, batch], [batch, width]], [dtype, dtype])
    for _ in range(passes):
        calls += [("CompiledFunction", [[]], [""])] * compiled
        calls += [("aten::mm", *products)] * (layers + again)
        calls += [("aten::mm", *gradient)] * layers
        calls += [("torch::autograd::AccumulateGrad", [[width, width]], ["float"])] * layers
    calls += [(name, [[width, width]], ["float"]) for name in _UPDATES[optimizer]]
    events: list[dict[str, Any]] = []
    for step in range(steps):
        begin = 1000 + step * 10_000
        events.append(_event("user_annotation", f"ProfilerStep#{step}", begin, 9_900, {}))
        for place, (name, dims, types) in enumerate(calls):
            arguments = {"Input Dims": dims, "Input type": types}
            events.append(_event("cpu_op", name, begin + 100 * place, 80, arguments))
    (rank / "trace.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))


def _event(
    category: str, name: str, start: int, length: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    known = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1}
    return {**known, "ts": start, "dur": length, "args": arguments}
