"""optimizer=foreach|fused: the same update with fewer launches and fewer passes over the bytes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.explain.replay.graph import CallKind, Phase
from stepscope.predict.edit import Selection, insert, remove
from stepscope.predict.kernels import FLOOR_NS
from stepscope.predict.whatifs.outcome import Outcome, Refused, WrongValue, changed

if TYPE_CHECKING:
    from stepscope.explain.replay.graph import Flags
    from stepscope.predict.scene import Scene

HELP = "foreach or fused instead of what runs now"
VALUES = ("foreach", "fused")


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """Adam's update: what the host pays for it, and the bytes moved for each parameter.

    Host times are shares of one another, so a slow host stays slow. Measured on an H200 with GPT-2
    small, the models of benchmarks/workloads and a stack of linear layers (docs/accuracy.md).
    """

    step_us: float  # of the host, once a step
    tensor_us: float  # and for each tensor
    bytes_each: float  # for each parameter, at the full bandwidth
    launches: float  # for each million parameters, and a few at least
    fewest: int
    order: int

    def host_us(self, tensors: int) -> float:
        return self.step_us + self.tensor_us * tensors


KINDS = {
    "loop": Kind(step_us=700, tensor_us=107.0, bytes_each=109.0, launches=0.0, fewest=8, order=0),
    "foreach": Kind(step_us=890, tensor_us=17.0, bytes_each=93.0, launches=0.42, fewest=8, order=1),
    "fused": Kind(step_us=470, tensor_us=6.0, bytes_each=36.0, launches=0.06, fewest=4, order=2),
}
_FUSED = re.compile(r"_fused_(?:adam|adamw|sgd|adagrad)", re.IGNORECASE)
_FOREACH = re.compile(r"_foreach_")
_NEGLIGIBLE = 0.02


def apply(scene: Scene, value: str) -> Outcome:
    """Refuses where the optimizer is as asked already, or none can be seen."""
    if value not in VALUES:
        raise WrongValue(f"optimizer={value}: choose foreach or fused")
    stepping = _stepping(scene)
    now = current_kind(scene)
    if now is None or not stepping.any():
        raise Refused("optimizer: the trace shows no optimizer step")
    if KINDS[now].order >= KINDS[value].order:
        raise Refused(f"optimizer={value}: the optimizer is {now} already")
    parameters = scene.parameters
    if parameters is None:
        raise Refused("optimizer: the trace does not tell the parameters (record shapes)")
    old, new = KINDS[now], KINDS[value]
    graph = scene.graph
    mine = stepping[graph.tasks.call]
    host = float((graph.calls.gap_ns + graph.calls.call_ns)[stepping].sum())
    host_new = host * new.host_us(parameters.tensors) / old.host_us(parameters.tensors)
    ceilings = scene.ceilings
    rate = ceilings.bytes_s if ceilings and ceilings.bytes_s else None
    device = float(graph.tasks.dur_ns[mine].sum())
    device_new = (
        parameters.elements * new.bytes_each / rate * 1e9
        if rate
        else device * new.bytes_each / old.bytes_each
    )
    count = max(new.fewest, round(new.launches * parameters.elements / 1e6))
    device_new = max(device_new, count * FLOOR_NS)
    place = np.full(count, int(np.flatnonzero(stepping)[0]), np.int32)
    stream = int(graph.tasks.stream[mine][0]) if mine.any() else 0
    graph = insert(
        graph,
        place,
        gap_ns=host_new * 0.9 / count,
        call_ns=host_new * 0.1 / count,
        dur_ns=device_new / count,
        stream=stream,
    )
    # The new calls stand before the first old one and have its phase.
    chosen = np.concatenate((stepping[: place[0]], np.zeros(count, np.bool_), stepping[place[0] :]))
    graph = remove(graph, Selection(calls=chosen, tasks=chosen[graph.tasks.call]))
    on_device = f", {device / 1e6:.2f} -> {device_new / 1e6:.2f} ms of the device"
    return Outcome(
        scene=changed(scene, graph),
        assumptions=(
            f"{now} -> {value} for {parameters.tensors} tensors of {parameters.elements:,} "
            f"parameters: {host / 1e6:.2f} -> {host_new / 1e6:.2f} ms of the host"
            f"{'' if scene.on_host else on_device}",
            "as an Adam of this kind does; other optimizers move other bytes",
        ),
        spread=0.2,
    )


def current_kind(scene: Scene) -> str | None:
    """By the names of what the optimizer's calls run."""
    stepping = _stepping(scene)
    if not stepping.any():
        return None
    host, device, strings = scene.trace.host, scene.trace.device, scene.trace.strings
    rows = scene.graph.calls.operator[stepping]
    names = {strings[host.name[row]] for row in rows[rows >= 0].tolist()}
    kernels = scene.graph.tasks.row[stepping[scene.graph.tasks.call]]
    if len(device):
        names |= {strings[device.name[row]] for row in kernels[kernels >= 0].tolist()}
    if any(_FUSED.search(name) for name in names):
        return "fused"
    lists = sum(bool(_FOREACH.search(name)) for name in names)
    return "foreach" if lists or any("multi_tensor" in name for name in names) else "loop"


def _stepping(scene: Scene) -> Flags:
    calls = scene.graph.calls
    found: Flags = (calls.phase == Phase.OPTIMIZER) & (calls.kind != CallKind.WAIT)
    return found
