"""The simulation of a job: all ranks run a training loop together, in true time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jobs_plan import (
    ABSENT,
    ALPHA_NS,
    BETA_NS,
    CALL_NS,
    KIND,
    LABELS,
    PICKUP_NS,
    PIPELINES,
    Floats,
    Ints,
    Layer,
    Plan,
    layers_of,
    size_of,
)

Ranks = NDArray[np.intp]
ROUNDS_BEFORE_NS = 3e8
_CALL_COLUMNS: dict[str, Any] = {
    "rank": np.intp,
    "kind": np.int8,
    "group": np.int32,  # among all groups of the job
    "sequence": np.int64,
    "size_bytes": np.int64,
    "peer": np.int32,
    "step": np.int32,
    "stream": np.int8,
    "match": np.int64,  # equal for the calls of one collective, or of a send and its receive
    "called": np.float64,  # the caller makes the call
    "arrival": np.float64,  # as Calls.arrival_ns is defined for the backend
    "start": np.float64,
    "end": np.float64,
}
_COMPUTE_COLUMNS: dict[str, Any] = {
    "rank": np.intp,
    "step": np.int32,
    "label": np.int8,
    "start": np.float64,
    "end": np.float64,
}


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened, in true time. Flat columns, ordered by rank and then by time.

    `steps` are (steps, ranks); a step is input, other, then work, until all of it is done.
    """

    step_start: Floats
    step_end: Floats
    input_end: Floats
    compute: dict[str, NDArray[Any]]  # rank, step, label, start, end
    calls: dict[str, NDArray[Any]]  # see _CALL_COLUMNS
    layers: tuple[Layer, ...]
    came: Floats  # (syncs, rounds, ranks)
    left: Floats

    def of_rank(self, table: dict[str, NDArray[Any]], rank: int) -> dict[str, NDArray[Any]]:
        """One rank's rows."""
        low, high = np.searchsorted(table["rank"], (rank, rank + 1))
        return {name: values[low:high] for name, values in table.items()}


def play(plan: Plan) -> Timeline:
    layers = layers_of(plan)
    world = _World(plan, layers)
    pace, loading = paces(plan)
    starts, inputs, ends = [], [], []
    run = _STEPS[plan.form]
    for step in range(plan.steps):
        world.step = step
        starts.append(world.now)
        inputs.append(world.now + loading[step])
        world.now = inputs[-1] + plan.other_ns
        run(world, layers, plan.compute_ns * pace[step])
        world.settle()
        world.work("optimizer", 0.04 * plan.compute_ns * pace[step])
        ends.append(world.now.copy())
        world.now = world.now.copy()
    came, left = _rounds(plan, float(ends[-1].max()))
    return Timeline(
        step_start=np.array(starts),
        step_end=np.array(ends),
        input_end=np.array(inputs),
        compute=world.compute.table("start"),
        calls=world.calls.table("called"),
        layers=layers,
        came=came,
        left=left,
    )


def _rounds(plan: Plan, end_ns: float) -> tuple[Floats, Floats]:
    """(syncs, rounds, ranks): rank 0 enters and leaves at one instant."""
    shape = (2, plan.rounds, plan.ranks)
    came, left = np.zeros(shape), np.zeros(shape)
    draw = np.random.default_rng([plan.seed, 2])
    to, back = (12e3 + draw.exponential(12e3, shape) for _ in range(2))
    for sync, begins in enumerate((-ROUNDS_BEFORE_NS, end_ns + 2e8)):
        ready = begins + draw.uniform(0, 1e6, plan.ranks)
        for turn in range(plan.rounds):
            instant = float((ready + to[sync, turn])[1:].max()) + 2e3
            out = instant + back[sync, turn] + 200.0 * np.arange(plan.ranks)
            came[sync, turn], left[sync, turn] = ready, out
            came[sync, turn, 0] = left[sync, turn, 0] = instant
            ready = out + draw.uniform(1e3, 4e3, plan.ranks)
    return came, left


def _slow_links(plan: Plan, layers: tuple[Layer, ...]) -> dict[str, Floats]:
    """By layer: the factor on each group's transfers."""
    out = {layer.description: np.ones(len(layer.members)) for layer in layers}
    if plan.fault is not None and plan.fault.cause == "link":
        out[plan.fault.layer][plan.fault.place] = plan.fault.size
    return out


def paces(plan: Plan) -> tuple[Floats, Floats]:
    """(steps, ranks): the factor on compute, and the time of input."""
    draw = np.random.default_rng([plan.seed, 4])
    shape = (plan.steps, plan.ranks)
    pace = np.exp(draw.normal(0, plan.noise, shape))
    pace *= np.exp(draw.normal(0, plan.common, (plan.steps, 1)))
    pace *= np.exp(draw.normal(0, plan.spread, plan.ranks))
    loading = plan.input_ns * np.exp(draw.normal(0, 3 * plan.noise, shape))
    count = min(plan.transients, plan.ranks)
    pace[draw.integers(plan.steps, size=count), draw.choice(plan.ranks, count, False)] *= 1.5
    if plan.form in PIPELINES:
        loading[:, plan.replicas :] = 0.0
    fault = plan.fault
    if fault is not None and fault.cause == "compute":
        pace[:, fault.place] *= fault.size
    if fault is not None and fault.cause == "stage":
        pace[:, fault.place * plan.replicas : (fault.place + 1) * plan.replicas] *= fault.size
    if fault is not None and fault.cause == "input":
        more = fault.size * (plan.compute_ns + plan.input_ns + plan.other_ns)
        loading[:, fault.place] += more * np.exp(draw.normal(0, plan.noise, plan.steps))
    return pace, loading


class _Rows:
    """Columns that grow by an array, or by one value for all rows."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self._columns = columns
        self._counts: list[int] = []
        self._held: dict[str, list[Any]] = {name: [] for name in columns}

    def add(self, rank: Ranks, **values: Any) -> None:
        self._counts.append(len(rank))
        self._held["rank"].append(rank)
        for name, value in values.items():
            self._held[name].append(value)

    def table(self, by: str) -> dict[str, NDArray[Any]]:
        """Sort by rank, then by that column."""
        flat = {name: self._column(name) for name in self._columns}
        order = np.lexsort((flat[by], flat["rank"]))
        return {name: values[order] for name, values in flat.items()}

    def _column(self, name: str) -> NDArray[Any]:
        held, kind = self._held[name], self._columns[name]
        if all(isinstance(value, int) for value in held):
            return np.repeat(np.array(held, kind), self._counts)
        whole = [
            np.full(count, value) if isinstance(value, int) else value
            for value, count in zip(held, self._counts, strict=True)
        ]
        return np.concatenate(whole).astype(kind, copy=False)


class _World:
    """All ranks' true time as they run the program together."""

    def __init__(self, plan: Plan, layers: tuple[Layer, ...]) -> None:
        self.plan = plan
        self.everyone = np.arange(plan.ranks)
        self.now = np.zeros(plan.ranks)
        self.free: dict[int, Floats] = {}  # by stream: when its last collective is over
        self.step = 0
        self.compute = _Rows(_COMPUTE_COLUMNS)
        self.calls = _Rows(_CALL_COLUMNS)
        self.slow = _slow_links(plan, layers)
        self._draw = np.random.default_rng([plan.seed, 3])
        self._alpha_ns, self._beta_ns = ALPHA_NS[plan.backend], BETA_NS[plan.backend]
        self._call_ns, self._pickup_ns = CALL_NS[plan.backend], PICKUP_NS[plan.backend]
        self._sequence: dict[int, int] = {}
        self._sent = np.zeros(plan.ranks, np.int64)
        self._matches = 0

    def work(self, label: str, took: Floats, who: Ranks | None = None) -> None:
        """These ranks compute."""
        who = self.everyone if who is None else who
        start = self.now[who]
        self.now[who] = start + took
        code = LABELS.index(label)
        self.compute.add(who, step=self.step, label=code, start=start, end=start + took)

    def collective(
        self, kind: str, layer: Layer, size: int, *, stream: int, blocking: bool = False
    ) -> Floats:
        """Every rank calls it in its group; returns when each rank's call is over."""
        if layer.size < 2:
            return self.now.copy()
        called = self.now.copy()
        begin, start = self._begin(called, stream, self.everyone)
        of = layer.of_rank
        took = self._transfer(size, len(layer.members), layer.size) * self.slow[layer.description]
        if kind == "broadcast":  # ranks wait for the root only
            last = np.maximum(start, start[layer.members[:, 0]][of])
        else:
            last = start[layer.members].max(1)[of]
        end = last + took[of] + self._draw.exponential(1.5e3, len(of))
        self.free[stream] = end
        sequence = self._sequence.get(layer.first, 1000)
        self._sequence[layer.first] = sequence + 1
        root = layer.members[of, 0] if kind == "broadcast" else ABSENT
        match = self._match(len(layer.members))[of]
        times = (called, begin, start, end)
        self._add(self.everyone, kind, layer.first + of, sequence, size, root, stream, match, times)
        self.now = end.copy() if blocking else called + self._call_ns
        return end

    def receive(self, phase: str, sent: Floats, source: Ranks, target: Ranks, by: Layer) -> None:
        """Targets wait for what the sources send; the sources do not wait."""
        stream = 2 if phase == "forward" else 4
        size = size_of(self.plan, 1 / 8)
        called = self.now[target]
        given, sending = self._begin(sent, stream, source)
        taken, taking = self._begin(called, stream + 1, target)
        over = np.maximum(sending, taking) + self._transfer(size, len(source), 2)
        match = self._match(len(source))

        def record(who: Ranks, kind: str, peer: Ranks, at: int, *times: Floats) -> Floats:
            end = over + self._draw.exponential(1.5e3, len(who))
            self.free[at][who] = end
            group = by.first + by.of_rank[who]
            # each rank counts its own point-to-point calls
            self._add(who, kind, group, self._sent[who], size, peer, at, match, (*times, end))
            self._sent[who] += 1
            return end

        record(source, "send", target, stream, sent, given, sending)
        self.now[target] = record(target, "recv", source, stream + 1, called, taken, taking)

    def settle(self) -> None:
        """Wait for all communication."""
        for end in self.free.values():
            self.now = np.maximum(self.now, end)

    def _begin(self, called: Floats, stream: int, who: Ranks) -> tuple[Floats, Floats]:
        """A stream does one thing at a time; its worker needs a moment to start a call."""
        if stream not in self.free:
            self.free[stream] = np.zeros(self.plan.ranks)
        begin = np.maximum(called, self.free[stream][who])
        if not self._pickup_ns:
            return begin, begin
        return begin, begin + self._pickup_ns + self._draw.exponential(self._pickup_ns, len(who))

    def _transfer(self, size: int, count: int, ranks: int) -> Floats:
        bare = self._alpha_ns * (1 + 0.25 * np.log2(ranks)) + size * self._beta_ns
        noisy = np.exp(self._draw.normal(0, self.plan.transfer_noise, count))
        return np.asarray(bare * noisy)

    def _add(
        self,
        who: Ranks,
        kind: str,
        group: Ranks,
        sequence: Any,
        size: int,
        peer: Any,
        stream: int,
        match: Ints,
        times: tuple[Floats, ...],  # called, begun, started, ended
    ) -> None:
        called, begun, started, ended = times
        self.calls.add(
            who,
            kind=KIND[kind],
            group=group,
            sequence=sequence,
            size_bytes=size,
            peer=peer,
            step=self.step,
            stream=stream,
            match=match,
            called=called,
            arrival=begun if self.plan.backend == "nccl" else called,
            start=started,
            end=ended,
        )

    def _match(self, count: int) -> Ints:
        self._matches += count
        return np.arange(self._matches - count, self._matches)


def _ddp_step(world: _World, layers: tuple[Layer, ...], took: Floats) -> None:
    if world.plan.broadcast:
        world.collective("broadcast", layers[0], 4096, stream=0, blocking=True)
    world.work("forward", 0.32 * took)
    _backward_with_buckets(world, layers[0], 0.64 * took)


def _backward_with_buckets(world: _World, layer: Layer, took: Floats) -> None:
    plan = world.plan
    for bucket in range(plan.collectives):
        world.work("backward", took / plan.collectives)
        size = size_of(plan, 1.0 if bucket < plan.collectives - 1 else 1 / 3)
        world.collective("all_reduce", layer, size, stream=0)


def _tensor_step(world: _World, layers: tuple[Layer, ...], took: Floats) -> None:
    """Two blocking all-reduces per layer forward and two backward; then the replicas'."""
    _tensor_layers(world, layers[1], "forward", 0.32 * took)
    _tensor_layers(world, layers[1], "backward", 0.64 * took)
    size = size_of(world.plan, world.plan.collectives / 2)
    world.collective("all_reduce", layers[2], size, stream=0, blocking=True)


def _mixed_step(world: _World, layers: tuple[Layer, ...], took: Floats) -> None:
    """Tensor parallel forward; backward with the replicas' buckets on another stream."""
    plan = world.plan
    _tensor_layers(world, layers[1], "forward", 0.32 * took)
    for _ in range(plan.collectives):
        world.work("backward", 0.64 * took / plan.collectives)
        world.collective("all_reduce", layers[1], size_of(plan, 1 / 4), stream=1, blocking=True)
        world.collective("all_reduce", layers[2], size_of(plan, 1 / 2), stream=0)


def _tensor_layers(world: _World, layer: Layer, label: str, took: Floats) -> None:
    plan = world.plan
    for _ in range(2 * plan.collectives):
        world.work(label, took / (2 * plan.collectives))
        world.collective("all_reduce", layer, size_of(plan, 1 / 4), stream=1, blocking=True)


def _fsdp_step(world: _World, layers: tuple[Layer, ...], took: Floats) -> None:
    """Parameters are gathered one layer ahead; gradients are scattered one layer later."""
    plan = world.plan
    for label, share in (("forward", 0.32), ("backward", 0.64)):
        ready = world.collective("all_gather", layers[0], size_of(plan), stream=0)
        for layer in range(plan.collectives):
            ahead = ready
            if layer + 1 < plan.collectives:
                ahead = world.collective("all_gather", layers[0], size_of(plan), stream=0)
            world.now = np.maximum(world.now, ready)
            world.work(label, share * took / plan.collectives)
            if label == "backward":
                world.collective("reduce_scatter", layers[0], size_of(plan), stream=1)
            ready = ahead


def _pipeline_step(world: _World, layers: tuple[Layer, ...], took: Floats) -> None:
    """Each stage follows its order; one that waits for a message is skipped."""
    plan = world.plan
    _, replicas, chain = layers
    orders = [list(schedule(plan, stage)) for stage in range(plan.stages)]
    sent: dict[tuple[str, int, int], Floats] = {}
    while any(orders):
        for stage, order in enumerate(orders):
            while order and _is_ready(plan, sent, stage, *order[0]):
                _micro_step(world, replicas, chain, sent, stage, took, *order.pop(0))
    world.settle()
    world.collective("all_reduce", replicas, size_of(plan), stream=0, blocking=True)


def schedule(plan: Plan, stage: int) -> Iterator[tuple[str, int]]:
    """A stage's order of micro-batches: all forward first, or one forward, one backward."""
    count = plan.microbatches
    warm = count if plan.form == "gpipe" else min(count, plan.stages - stage - 1)
    yield from (("forward", micro) for micro in range(warm))
    for micro in range(count):
        if warm + micro < count:
            yield "forward", warm + micro
        yield "backward", micro


def _source(plan: Plan, stage: int, phase: str) -> int | None:
    """The stage that a micro-batch comes from."""
    source = stage - 1 if phase == "forward" else stage + 1
    return source if 0 <= source < plan.stages else None


def _is_ready(
    plan: Plan, sent: dict[tuple[str, int, int], Floats], stage: int, phase: str, micro: int
) -> bool:
    source = _source(plan, stage, phase)
    return source is None or (phase, micro, source) in sent


def _micro_step(
    world: _World,
    replicas: Layer,
    chain: Layer,
    sent: dict[tuple[str, int, int], Floats],
    stage: int,
    took: Floats,
    phase: str,
    micro: int,
) -> None:
    plan = world.plan
    mine, source = replicas.members[stage], _source(plan, stage, phase)
    if source is not None:
        message = sent[phase, micro, source]
        world.receive(phase, message, replicas.members[source], mine, chain)
    share = 0.32 if phase == "forward" else 0.64
    world.work(phase, share * took[mine] / plan.microbatches, mine)
    sent[phase, micro, stage] = world.now[mine]


_STEPS: dict[str, Callable[[_World, tuple[Layer, ...], Floats], None]] = {
    "ddp": _ddp_step,
    "tensor": _tensor_step,
    "mixed": _mixed_step,
    "fsdp": _fsdp_step,
    "gpipe": _pipeline_step,
    "1f1b": _pipeline_step,
}
