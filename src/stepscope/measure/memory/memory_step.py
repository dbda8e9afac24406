"""Measure one step's bytes by category, with its peak and what held it.

Unmeasured is null, never zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from stepscope.measure.memory.allocator import (
    NO_POOLS,
    Allocator,
    AllocatorPeak,
    Labels,
    PhaseTicks,
    PrivatePools,
    Reading,
    nearest,
    replay,
)
from stepscope.measure.memory.autograd_graph import BackwardGraph, sum_by_producer
from stepscope.measure.memory.saved_tensors import OUTSIDE, LineHistory, Saved, SavedTensors
from stepscope.measure.memory.storages import (
    KNOWN,
    Held,
    Key,
    Model,
    batch_bytes,
    bytes_by_kind,
    on,
)
from stepscope.measure.patches import has_compiled
from stepscope.measure.source_lines import UserLine

#     step = MemoryStep(optimizers); step.begin(); ... the step runs ...; step.end() -> memory.json
#
# `categories` is the largest size of each category in the step; `peak.categories` is what was held
# together at the highest point and adds up to it. `growing` is the moment that holds most of what
# grows with the batch: another one, if few samples are small beside the optimizer's update.
# Unmeasured is null, never zero.

SCHEMA = 1
COUNTED = (*KNOWN, "activations")
CATEGORIES = (
    "parameters", "gradients", "optimizer", "activations", "buffers", "temporaries", "other",
)  # fmt: skip
_SINCE_START = "since the process began or the script's last reset"

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class _Moment:
    """What was held at a phase's end."""

    phase: str
    held: Held
    activations: int
    reading: Reading | None
    pooled: int = 0  # of the activations, in private pools of CUDA graphs
    known: int = 0


class MemoryStep:
    """Begin right after an optimizer step, end right after the next one."""

    def __init__(self, optimizers: Sequence[Any], *, lines: bool = False) -> None:
        """With `lines`, activations are also told apart by the user's line that made them."""
        self._notes: set[str] = set()
        self._model = Model(optimizers, self._notes)
        self._kind = "cpu"
        self._allocator: Allocator | None = None
        self._saved: SavedTensors | None = None
        self._moments: dict[str, _Moment] = {}
        self._readings: list[Reading] = []
        self._labels = Labels()
        self._phases = PhaseTicks()
        self._running = ["forward"]
        self._largest = 0  # activations alive together
        self._pooled = 0  # activations together in private pools of CUDA graphs
        self._by_module: dict[int, tuple[int, int]] = {}
        self._by_producer: list[dict[str, Any]] = []
        self._lines = LineHistory() if lines else None
        self._by_line: dict[UserLine, tuple[int, int]] = {}
        self._compiled = False
        self._growing: dict[str, Any] | None = None  # the moment with most that grows
        self._graph: BackwardGraph | None = None

    def begin(self) -> None:
        """Right before the step."""
        self._guarded("finding modules", self._model.find_roots)
        self._kind = self._guarded("finding the device", self._model.kind) or "cpu"
        self._guarded("the allocator", self._watch_allocator)
        self._guarded("the state before the step", lambda: self._keep("begin"))
        self._mark("forward")
        self._guarded("watching the graph", self._watch_graph)
        if self._lines is not None:
            self._guarded("watching lines", self._lines.watch.begin)

    def phase(self, name: str, *, entering: bool) -> None:
        """A phase begins or ends; forward is what runs in between."""
        if name not in ("backward", "optimizer"):
            return
        if entering:
            self._running.append(name)
        elif self._running[-1] == name:
            self._running.pop()
            if name == "backward" and "backward" not in self._running:
                self._guarded("the state after backward", lambda: self._keep("backward"))
        self._mark(self._running[-1])

    def end(self) -> dict[str, Any]:
        """Right after the optimizer step. Every hook is gone afterwards."""
        try:
            if self._lines is not None:
                self._guarded("leaving lines", self._lines.watch.end)
            self._guarded("the state after the step", lambda: self._keep("optimizer"))
            self._guarded("remarks", self._model.remarks)
            return self._result()
        finally:
            self._guarded("leaving", self._leave)

    # watching

    def _watch_allocator(self) -> None:
        devices = self._model.devices(self._kind)
        self._allocator = Allocator(self._kind, devices, self._notes)
        self._allocator.start_history()

    def _watch_graph(self) -> None:
        self._compiled = has_compiled()
        if self._compiled:
            self._notes.add(
                "torch.compile is in use: activations are not divided by module, and inputs "
                "that compiled code saves count as activations"
            )
        self._saved = SavedTensors(
            self._notes,
            on_root=self._model.add_root,
            on_backward=self._before_backward,
            now=self._tick,
        )
        # Compiled code guards on module hooks: one of ours would make it compile again.
        self._saved.install(modules=not self._compiled)

    def _before_backward(self, outputs: Sequence[Any]) -> None:
        """The graph is complete: forward is over and activations are at their largest."""
        assert self._saved is not None
        self._model.leaves |= self._saved.leaves
        held = self._model.held()
        live = self._count_live(held)
        if not self._compiled and (self._graph is None or live > self._graph.saved_bytes):
            self._guarded("recording the graph", lambda: self._record_graph(outputs, held))
        if self._running.count("backward") <= 1:
            self._keep("forward", held=held, live=live)

    def _record_graph(self, outputs: Sequence[Any], held: Held) -> None:
        """Of several backward passes, the one whose graph holds most is kept."""
        assert self._saved is not None
        self._graph = self._saved.record_graph(outputs, held.owner()) or self._graph

    def _count_live(self, held: Held) -> int:
        """Bytes of activations alive now, without storages of other categories."""
        live = self._find_live(held)
        for saved in live.values():
            saved.counted = True
        total = sum(saved.size_bytes for saved in live.values())
        if total > self._largest:
            self._largest, self._by_module = total, sum_by_module(live)
            if self._saved is not None:
                self._by_producer = sum_by_producer(self._saved.nodes, live.values())
            if self._lines is not None:
                self._by_line = self._lines.bytes_by_line(live.values())
        return total

    def _find_live(self, held: Held) -> dict[Key, Saved]:
        owner = held.owner()
        alive = self._saved.live() if self._saved is not None else {}
        return {k: saved for k, saved in alive.items() if k not in owner and on(k, self._kind)}

    def _keep(self, phase: str, *, held: Held | None = None, live: int | None = None) -> None:
        """Keep the forward that holds most (accumulation runs several); else the last moment."""
        held = self._model.held() if held is None else held
        live = self._count_live(held) if live is None else live
        reading = self._allocator.read() if self._allocator is not None else None
        if reading is not None:
            self._readings.append(reading)
            for category, keys in held.storages.items():
                self._labels.add(keys, category, reading.allocations)
        moment = _Moment(phase=phase, held=held, activations=live, reading=reading)
        if reading is not None and reading.pools.sizes:
            alive = {key: saved.size_bytes for key, saved in self._find_live(held).items()}
            moment.pooled = reading.pools.bytes_of(alive)
            self._pooled = max(self._pooled, moment.pooled)
        moment.known = live + sum(held.total(category, self._kind) for category in KNOWN)
        before = self._moments.get(phase)
        if before is None or phase != "forward" or moment.known > before.known:
            self._moments[phase] = moment

    def _mark(self, phase: str) -> None:
        self._phases.begin(phase, self._tick())

    def _tick(self) -> int:
        return self._allocator.allocations() if self._allocator is not None else 0

    def _leave(self) -> None:
        if self._allocator is not None:
            self._allocator.stop_history()
        if self._saved is not None:
            self._saved.remove()
        self._model.forget()

    def _guarded(self, what: str, act: Callable[[], T]) -> T | None:
        """A part that fails is noted and stops nothing else."""
        try:
            return act()
        except Exception as error:
            self._notes.add(f"{what}: {type(error).__name__}: {error}")
            return None

    # the account

    def _result(self) -> dict[str, Any]:
        events = self._allocator.stop_history() if self._allocator is not None else None
        moments = self._in_order()
        levels = {moment.phase: self._levels(moment) for moment in moments}
        peak = self._guarded("the peak", lambda: self._peak(moments, levels, events))
        if peak is None:
            peak = {"allocated_bytes": None, "reserved_bytes": None, "phase": None}
            peak["categories"] = dict.fromkeys(CATEGORIES)
        largest = {
            name: max((level[name] or 0 for level in levels.values()), default=None)
            for name in COUNTED
        }
        if self._saved is None:
            largest["activations"] = None
        elif largest["activations"] is not None:
            largest["activations"] = self._largest
        held_in = peak["categories"]
        rest = {name: held_in[name] for name in ("temporaries", "other")}
        return {
            "schema": SCHEMA,
            "device": self._kind,
            "categories": _ordered({**largest, **rest}),
            "phases": [
                {
                    "phase": moment.phase,
                    "categories": _ordered(levels[moment.phase]),
                    "allocated_bytes": moment.reading and moment.reading.allocated_bytes,
                    "reserved_bytes": moment.reading and moment.reading.reserved_bytes,
                }
                for moment in moments
            ],
            "peak": peak,
            "growing": self._growing,
            "activations_by_module": self._guarded("module names", self._modules) or [],
            "activations_by_producer": self._by_producer,
            **self._lines_content(),
            "saved_bytes": self._saved_bytes(),
            **(self._guarded("the batch", self._batch_content) or {}),
            "inputs": self._inputs(),
            "elsewhere_bytes": self._elsewhere(moments),
            **(self._graph_pools(moments[-1]) if moments else {}),
            "storages": self._storages(moments),
            "graph": self._guarded("the graph", self._graph_content),
            "notes": sorted(self._notes),
        }

    def _in_order(self) -> list[_Moment]:
        """A module that was first seen running already held its parameters before."""
        names = ("begin", "forward", "backward", "optimizer")
        moments = [self._moments[name] for name in names if name in self._moments]
        last = moments[-1].held if moments else Held()
        for moment in moments:
            if moment.held.roots < last.roots:
                moment.held.storages["parameters"] = last.storages["parameters"]
                moment.held.storages["buffers"] = last.storages["buffers"]
        for name in names[1:]:
            if name not in self._moments:
                self._notes.add(f"{name} was not seen in this step")
        return moments

    def _levels(self, moment: _Moment) -> dict[str, int | None]:
        level: dict[str, int | None] = {
            category: moment.held.total(category, self._kind) for category in KNOWN
        }
        in_graphs, temporaries = self._in_graphs(moment)
        kept = moment.activations - moment.pooled + in_graphs
        level["activations"] = kept if self._saved is not None else None
        level["temporaries"] = level["other"] = None
        if moment.reading is not None:
            # Between phases only graphs keep temporaries: the rest is the batch and foreign memory.
            level["temporaries"] = temporaries
            rest = moment.reading.allocated_bytes - _known(level) - temporaries
            level["other"] = self._rest(rest)
        return level

    def _in_graphs(self, moment: _Moment) -> tuple[int, int]:
        """What private pools keep for activations, and for temporaries."""
        return _pools_of(moment).kept_for(moment.held.storages.values(), self._pooled)

    def _rest(self, left: int) -> int:
        if left < 0:
            self._notes.add(
                f"the training holds {-left} bytes that did not come from torch's allocator"
            )
        return max(0, left)

    def _peak(
        self,
        moments: list[_Moment],
        levels: dict[str, dict[str, int | None]],
        events: list[Any] | None,
    ) -> dict[str, Any]:
        begin = self._moments.get("begin")
        if events is not None and begin is not None and begin.reading is not None:
            peak = self._guarded("replaying the allocator", lambda: self._replayed(begin, events))
            if peak is not None:
                return peak
        known = {moment.phase: _known(levels[moment.phase]) for moment in moments}
        top = max(reversed(moments), key=lambda moment: known[moment.phase])
        level = dict(levels[top.phase])
        result: dict[str, Any] = {
            "allocated_bytes": None,
            "reserved_bytes": None,
            "phase": top.phase,
            "categories": level,
            "known_bytes": known[top.phase],
            "measured": "the largest sum of known categories at the end of a phase",
        }
        if self._readings:
            self._from_counters(result, levels["begin"]["other"] or 0)
        result["categories"] = _ordered(result["categories"])
        return result

    def _from_counters(self, result: dict[str, Any], other: int) -> None:
        """Without a history: the allocator's own peak, perhaps of an earlier step."""
        first, last = self._readings[0], self._readings[-1]
        rose = last.peak_bytes > first.peak_bytes
        peak = last.peak_bytes - last.pools.live_bytes + last.pools.size_bytes
        left = self._rest(peak - result["known_bytes"])
        result["categories"]["other"] = min(other, left)
        result["categories"]["temporaries"] = left - min(other, left)
        result["allocated_bytes"] = peak
        result["reserved_bytes"] = max(reading.reserved_bytes for reading in self._readings)
        result["since_start_bytes"] = last.peak_bytes
        result["measured"] = "the allocator's counter " + (
            "rose in this step" if rose else f"is {_SINCE_START}; this step did not exceed it"
        )

    def _replayed(self, begin: _Moment, events: list[Any]) -> dict[str, Any]:
        assert begin.reading is not None
        start = {name: begin.held.total(name, self._kind) for name in KNOWN}
        start["activations"], start["temporaries"] = self._in_graphs(begin)
        start["other"] = self._rest(begin.reading.requested_bytes - sum(start.values()))
        if self._saved is not None:
            for key, saved in self._saved.seen:
                if saved.counted:
                    self._labels.add([key], "activations", saved.seen_at)
            for key, given in self._saved.given:
                self._labels.add([key], "other", given.seen_at)
        follow = partial(
            replay,
            events,
            start=start,
            owners={key[1]: name for key, name in begin.held.owner().items()},
            labels=self._labels,
            clock=begin.reading.allocations,
            pools=self._readings[-1].pools,
        )
        self._growing = self._at_moment(follow(weigh=self._growing_bytes))
        return self._at_moment(follow()) | {
            "reserved_bytes": max(reading.reserved_bytes for reading in self._readings),
            "since_start_bytes": self._readings[-1].peak_bytes,
            "measured": "this step, from the allocator's history",
        }

    def _growing_bytes(self, clock: int, level: Mapping[str, int]) -> int:
        """What grows with the batch: with a larger one, the moment that holds most of it is the
        peak."""
        if self._phases.at(clock) == "optimizer":
            return 0
        return level.get("activations", 0) + level.get("temporaries", 0)

    def _at_moment(self, moment: AllocatorPeak) -> dict[str, Any]:
        reading = nearest(self._readings, moment.allocations)
        rounding = max(0, reading.allocated_bytes - reading.requested_bytes)
        level = {name: max(0, moment.categories.get(name, 0)) for name in CATEGORIES}
        level["other"] += rounding
        return {
            "allocated_bytes": sum(level.values()),
            "phase": self._phases.at(moment.allocations),
            "categories": level,
            "known_bytes": _known(level),
            "rounding_bytes": rounding,
        }

    def _modules(self) -> list[dict[str, Any]]:
        """Largest first; they add up to the activations alive together."""
        # Largest first; small ones of a very large model are one row.
        names = self._model.names()
        sums: dict[str, tuple[int, int]] = {}
        for module, (size, tensors) in self._by_module.items():
            name = _NOWHERE if module == OUTSIDE else names.get(module, "(unnamed)")
            before = sums.get(name, (0, 0))
            sums[name] = (before[0] + size, before[1] + tensors)
        ranked = sorted(sums.items(), key=lambda item: (-item[1][0], item[0]))
        rest = ranked[_MOST_MODULES:]
        if rest:
            bytes_left, tensors_left = (sum(item[1][place] for item in rest) for place in (0, 1))
            name = f"({len(rest)} more modules)"
            ranked = [*ranked[:_MOST_MODULES], (name, (bytes_left, tensors_left))]
        return [
            {"module": name, "bytes": size, "tensors": tensors} for name, (size, tensors) in ranked
        ]

    def _graph_content(self) -> dict[str, Any] | None:
        return self._graph.content(self._model.outline()) if self._graph is not None else None

    def _lines_content(self) -> dict[str, Any]:
        """Largest first; nothing if lines were not asked for."""
        if self._lines is None:
            return {}
        ranked = sorted(self._by_line.items(), key=lambda item: -item[1][0])
        rows = [{**asdict(line), "bytes": b, "tensors": n} for line, (b, n) in ranked]
        return {"activations_by_line": rows}

    def _saved_bytes(self) -> int | None:
        """Everything saved in the step, alive together or not."""
        if self._saved is None:
            return None
        return sum(saved.size_bytes for _, saved in self._saved.seen if saved.counted)

    def _batch_content(self) -> dict[str, int | None]:
        if self._saved is None or self._compiled:
            return {"inputs_bytes": None}
        given = [(key, item.size_bytes) for key, item in self._saved.given]
        return batch_bytes(given, self._saved.given_forms, self._kind)

    def _inputs(self) -> list[dict[str, Any]]:
        """What outermost modules were called with."""
        calls = self._saved.calls if self._saved is not None else {}
        return [
            {"module": module, "shapes": shapes, "calls": count}
            for (module, shapes), count in calls.items()
        ]

    def _elsewhere(self, moments: list[_Moment]) -> dict[str, int]:
        """Known storages on another kind of device, such as offloaded optimizer state."""
        held = moments[-1].held.storages if moments else {}
        sizes = bytes_by_kind(*held.values())
        return {kind: size for kind, size in sizes.items() if kind != self._kind}

    def _graph_pools(self, moment: _Moment) -> dict[str, Any]:
        return _pools_of(moment).content(self._in_graphs(moment)[1])

    def _storages(self, moments: list[_Moment]) -> int:
        """Number of distinct storages counted in the step."""
        keys: set[Key] = {key for moment in moments for key in moment.held.owner()}
        saved = self._saved.seen if self._saved is not None else []
        return len(keys | {key for key, _ in saved})


def _pools_of(moment: _Moment) -> PrivatePools:
    return moment.reading.pools if moment.reading is not None else NO_POOLS


def _known(level: Mapping[str, int | None]) -> int:
    return sum(level[name] or 0 for name in COUNTED)


def _ordered(level: dict[str, Any]) -> dict[str, Any]:
    return {name: level.get(name) for name in CATEGORIES}


# The bytes that modules keep for backward.

_MOST_MODULES = 200
_NOWHERE = "(outside modules)"


def sum_by_module(live: Mapping[Key, Saved]) -> dict[int, tuple[int, int]]:
    """Bytes and tensors, by the number of the module that saved them."""
    sums: dict[int, tuple[int, int]] = {}
    for saved in live.values():
        size, tensors = sums.get(saved.module, (0, 0))
        sums[saved.module] = (size + saved.size_bytes, tensors + saved.tensors)
    return sums
