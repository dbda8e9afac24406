"""More workers, other links and other buckets for many steps at once, without replaying each.

What does not hang on a step's other changes (links by number of workers, the slowest of them, what
goes into which bucket) is found once: the crew. Of each changed step only its outline is kept. With
both, `crew_step` gives what `scale_out.replan` gives, for any number of workers and any link.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.replay.graph import Phase
from stepscope.explain.replay.schedule import step_ns
from stepscope.explain.work import Kind
from stepscope.predict import exchange
from stepscope.predict.buckets import CAP_BYTES, find_gradients, plan_buckets
from stepscope.predict.edit import scale_tasks
from stepscope.predict.kernels import FLOOR_NS, copy_ns
from stepscope.predict.norms import find_statistics
from stepscope.predict.outline import outline, split_call, with_slope
from stepscope.predict.slowest import find_straggling, slower
from stepscope.predict.traced import find_traced
from stepscope.predict.transfers import find_transfers
from stepscope.predict.whatifs import cuda_graphs
from stepscope.predict.whatifs.outcome import changed
from stepscope.records.devices import find_device
from stepscope.records.prediction import Setting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.explain.replay.graph import StepGraph
    from stepscope.predict.buckets import Buckets, Gradients
    from stepscope.predict.outline import Outline
    from stepscope.predict.scene import Scene
    from stepscope.predict.traced import Traced
    from stepscope.predict.transfers import Transfers
    from stepscope.predict.whatif import Bench
    from stepscope.records.profile import Segment

WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BUCKETS_MB = (1, 5, 10, 25, 50, 100)
_MB = 1 << 20
_MOST_BUCKETS = 60  # of one size: more are not worth their place in the report

Line = tuple[float, float, float]  # up to so many bytes, ns, ns a byte


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """Between so many workers."""

    ranks: int
    straggling: float
    spread: float
    basis: str
    all_reduce: tuple[Line, ...] = ()  # none for one worker
    broadcast: tuple[Line, ...] = ()
    beside: tuple[Line, ...] = ()  # an all-reduce while the host computes
    lost: float = 0.0
    said: tuple[str, ...] = ()


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """Gradients in buckets of one size."""

    bucket_mb: float | None  # None: as it is now
    size_bytes: tuple[float, ...]
    marks: tuple[int, ...]  # the moment of each, among the outline's; none where they are traced
    host_ns: tuple[float, ...]  # what DDP takes for each
    fill_ns: tuple[float, ...]


class Crew(msgspec.Struct, frozen=True, kw_only=True):
    """What all steps have in common."""

    before: int
    on_host: bool
    links: tuple[Link, ...]  # by number of workers
    ways: tuple[Way, ...]  # as now first
    retimed: bool  # buckets as now are tasks of the trace
    finish_ns: float  # of the host, behind the last sum
    # Batch norms' statistics before forward: bytes of each message, the host's time for it, behind.
    sent_bytes: tuple[float, ...] = ()
    send_ns: float = 0.0
    sent_ns: float = 0.0
    moments: int = 0
    forward: int = -1  # which moment forward is
    places: tuple[tuple[str, int], ...] = ()  # what every moment is, in order
    no_buckets: str = ""  # why there are no other sizes
    traced: Traced | None = None
    rows: tuple[int, ...] = ()  # of the trace, of those tasks


class Sketch(msgspec.Struct, frozen=True, kw_only=True):
    """One changed step."""

    planned: Outline | None  # the exchange is put in
    traced: Outline | None  # or it is there, with durations to be told
    compute: int  # which of the times the compute stream is
    waiting_ns: float = 0.0  # inside the traced exchange, for other ranks
    wait_ns: tuple[float, ...] = ()  # the same of each
    share: tuple[float, ...] = ()  # of the expected transfer that each took
    # If no collective took any time: the traced step, and that with other buckets, where that has
    # collectives besides.
    silent_ns: float = 0.0
    quiet_ns: float | None = None
    task_ns: float | None = None  # of a CUDA graph: the host's time for one more task


class CannotScale(Exception):  # noqa: N818 - an answer, not a failure
    """Why nothing can be said about more workers."""


def find_crew(bench: Bench) -> Crew:
    """Raises CannotScale with the what-if's own reason."""
    scene = bench.scene
    traced = find_traced(scene, scene.graph)
    before = traced.ranks if traced else 1
    said = _tried(bench, before)
    keeps = traced is not None and len(traced.tasks) > 0
    gradients = find_gradients(scene, scene.graph)
    plans = _plans(traced, gradients)
    places = _places(scene.graph, traced, gradients, plans, keeps)
    toll = traced is None
    statistics = find_statistics(scene) if toll else None
    rates = exchange.ON_CPU if scene.on_host else exchange.ON_DEVICE
    return Crew(
        before=before,
        on_host=scene.on_host,
        links=tuple(_link(scene, traced, ranks, before, said) for ranks in sorted(said)),
        ways=tuple(_way(scene, gradients, *plan, places, toll) for plan in plans),
        retimed=keeps,
        finish_ns=rates.step_ns if toll else 0.0,
        sent_bytes=tuple(map(float, statistics.messages_bytes)) if statistics else (),
        send_ns=rates.bucket_ns,
        sent_ns=rates.tensor_ns * statistics.tensors if statistics else 0.0,
        moments=len(places),
        forward=places.index(("forward", 0)) if places else -1,
        places=tuple(places),
        traced=traced,
        rows=tuple(scene.graph.tasks.row[traced.tasks].tolist()) if traced else (),
        no_buckets="" if gradients else "The trace does not tell the gradients' sizes",
    )


def _tried(bench: Bench, before: int) -> dict[int, tuple[str, ...]]:
    """What is assumed about each number of workers."""
    found: dict[int, tuple[str, ...]] = {before: ()}
    # The fewest that exchange something first: a reason names their number.
    for ranks in sorted({*WORKERS} - {before}, key=lambda ranks: (ranks < 2, ranks)):
        trial = bench.change(bench.begin(), Setting(name="workers", value=str(ranks)))
        if trial.refused:
            raise CannotScale(trial.refused[-1])
        found[ranks] = trial.assumptions
    return found


def _link(
    scene: Scene,
    traced: Traced | None,
    ranks: int,
    before: int,
    said: dict[int, tuple[str, ...]],
) -> Link:
    straggling = find_straggling(scene, ranks, before)
    found = _transfers(scene, traced, ranks)
    if found is None:
        return Link(ranks=ranks, straggling=straggling, spread=0.0, basis="none", said=said[ranks])
    meets = found.contention if scene.on_host else None
    return Link(
        ranks=ranks,
        straggling=straggling,
        spread=found.spread,
        basis=found.basis,
        all_reduce=_lines(found.lines["all_reduce"]),
        broadcast=_lines(found.lines["broadcast"]),
        beside=_lines(meets.beside) if meets else (),
        lost=meets.lost if meets else 0.0,
        said=said[ranks],
    )


def _transfers(scene: Scene, traced: Traced | None, ranks: int) -> Transfers | None:
    if ranks < 2:
        return None
    return find_transfers(
        ranks,
        trace=scene.trace,
        profiles=scene.profiles,
        seen=traced.seen if traced else None,
        device=find_device(scene.trace.device_name or ""),
        on_host=scene.on_host,
    )


def _lines(segments: Sequence[Segment]) -> tuple[Line, ...]:
    return tuple((float(s.to_bytes), s.alpha_ns, s.beta_ns_per_byte) for s in segments)


# Buckets, and the moments at which they are ready

_Plan = tuple[float | None, "Buckets", str]


def _plans(traced: Traced | None, gradients: Gradients | None) -> list[_Plan]:
    """Sizes that make other buckets than those before them; marks are the trace's or gradients'."""
    found: list[_Plan] = []
    if traced and traced.buckets:
        found.append((None, traced.buckets, "bucket"))
    if gradients is None:
        return found
    if not found:
        found.append((None, plan_buckets(gradients), "gradient"))
    usual = not (traced and traced.buckets)
    for size in BUCKETS_MB:
        if usual and size * _MB == CAP_BYTES:
            continue
        plan = plan_buckets(gradients, size * _MB, size * _MB)
        known = [np.array_equal(plan.size_bytes, each.size_bytes) for _, each, _ in found]
        if not any(known) and len(plan) <= _MOST_BUCKETS:
            found.append((float(size), plan, "gradient"))
    return found


def _places(
    graph: StepGraph,
    traced: Traced | None,
    gradients: Gradients | None,
    plans: list[_Plan],
    keeps: bool,
) -> list[tuple[str, int]]:
    """Every moment by what it is: one of the gradients or of the trace's buckets becomes ready."""
    if not plans:
        return []
    calls: dict[tuple[str, int], int] = {}
    if traced and traced.buckets and not keeps:
        calls |= {("bucket", i): at for i, at in enumerate(traced.buckets.ready.tolist())}
    if gradients is not None:
        closing = {
            number
            for _, plan, kind in plans
            if kind == "gradient"
            for number in _closing(plan, gradients)
        }
        calls |= {("gradient", number): int(gradients.ready[number]) for number in closing}
    ready = sorted(calls, key=lambda place: calls[place])
    first = _first_of_forward(graph)
    before = sum(calls[place] < first for place in ready)
    return [*ready[:before], ("forward", 0), *ready[before:], ("end", 0)]


def _way(
    scene: Scene,
    gradients: Gradients | None,
    size_mb: float | None,
    plan: Buckets,
    kind: str,
    places: list[tuple[str, int]],
    toll: bool,
) -> Way:
    sizes = plan.size_bytes.astype(np.float64)
    none = np.zeros(len(plan))
    rates = exchange.ON_CPU if scene.on_host else exchange.ON_DEVICE
    host = rates.bucket_ns + rates.tensor_ns * plan.tensors.astype(np.float64)
    return Way(
        bucket_mb=size_mb,
        size_bytes=tuple(sizes.tolist()),
        marks=_marks(gradients, plan, kind, places),
        host_ns=tuple((host if toll else none).tolist()),
        fill_ns=tuple((_fill(scene, sizes) if toll else none).tolist()),
    )


def _marks(
    gradients: Gradients | None, plan: Buckets, kind: str, places: list[tuple[str, int]]
) -> tuple[int, ...]:
    if kind == "bucket" or gradients is None:
        known = [("bucket", number) for number in range(len(plan))]
        return tuple(places.index(place) for place in known) if known[0] in places else ()
    return tuple(places.index(("gradient", number)) for number in _closing(plan, gradients))


def _closing(plan: Buckets, gradients: Gradients) -> list[int]:
    """The gradient that closes each bucket; of several types, the last that is ready then."""
    ends: list[int] = (np.cumsum(plan.tensors) - 1).tolist()
    if len(np.unique(gradients.dtype)) == 1:
        return ends
    last = {at: number for number, at in enumerate(gradients.ready.tolist())}
    return [last[at] for at in plan.ready.tolist()]


def _first_of_forward(graph: StepGraph) -> int:
    forward = np.flatnonzero(graph.calls.phase == Phase.FORWARD)
    return int(forward.min(initial=len(graph.calls)))


def _fill(scene: Scene, sizes: np.ndarray) -> np.ndarray:
    """Gradients into their bucket: read once, written once."""
    if scene.on_host:
        return 2 * sizes / exchange.ON_CPU.copied_bytes_s * 1e9
    if scene.ceilings is None:
        return np.full(len(sizes), FLOOR_NS)
    return copy_ns(2 * sizes, scene.ceilings)


# One step


def sketch(crew: Crew, scene: Scene, *, graphed: bool = False) -> Sketch:
    """The step with its other changes made; a CUDA graph is made of it behind the exchange."""
    graph = scene.graph
    traced = _traced(crew, scene)
    tasks = traced.tasks if traced else np.zeros(0, np.intp)
    bare = exchange.without_traced(graph, traced) if traced and len(tasks) else graph
    calls = _calls(crew, scene, graph, traced)
    ready = np.array(calls or [0], np.int32)
    place = exchange.find_place(bare, ready, on_host=scene.on_host)
    if calls:
        calls[-1] = place.end_of_backward
    one = _graphed(scene, bare) if graphed else None
    known = Sketch(
        planned=_planned(crew, bare, one, calls) if calls else None,
        traced=None,
        compute=1 + place.compute,
        task_ns=float(one.calls.call_ns.sum()) / len(one.tasks) if one else None,
    )
    if traced is None or not len(tasks):
        return known
    waiting, share = _waiting(scene, crew, traced, graph)
    whole = _graphed(scene, graph) if graphed else graph
    return replace(
        known,
        traced=_outline(crew, whole, (), tasks.tolist()),
        silent_ns=_silent(whole),
        quiet_ns=_silent(one or bare) if (bare.tasks.kind == Kind.COMM).any() else None,
        waiting_ns=float(waiting.sum()) if traced.buckets else 0.0,
        wait_ns=tuple(waiting.tolist()),
        share=tuple(share.tolist()),
    )


def _silent(graph: StepGraph) -> float:
    return step_ns(scale_tasks(graph, graph.tasks.kind == Kind.COMM, 0.0))


def _graphed(scene: Scene, graph: StepGraph) -> StepGraph:
    return cuda_graphs.apply(changed(scene, graph), "").scene.graph


def _traced(crew: Crew, scene: Scene) -> Traced | None:
    """The exchange of the trace in this graph: the same tasks, wherever they are now."""
    graph, known = scene.graph, crew.traced
    if known is None or not crew.retimed:
        shown = any(kind == "bucket" for kind, _ in crew.places)
        return find_traced(scene, graph) if shown else None
    return replace(known, tasks=np.flatnonzero(np.isin(graph.tasks.row, crew.rows)))


def _calls(crew: Crew, scene: Scene, graph: StepGraph, traced: Traced | None) -> list[int]:
    """The graph's calls at the crew's moments, the last one still open."""
    if not crew.places:
        return []
    ready = {"forward": [0], "end": [0], "gradient": [], "bucket": []}
    if any(kind == "gradient" for kind, _ in crew.places):
        gradients = find_gradients(scene, graph)
        ready["gradient"] = gradients.ready.tolist() if gradients else []
    if traced and traced.buckets:
        ready["bucket"] = traced.buckets.ready.tolist()
    ready["forward"] = [_first_of_forward(graph)]
    found = [ready[kind][number] for kind, number in crew.places]
    return [int(at) for at in np.maximum.accumulate(np.array(found))]


def _outline(
    crew: Crew, graph: StepGraph, cuts: Sequence[int], marked: Sequence[int] = ()
) -> Outline:
    """With what a slower worker changes, where that is not simply a share of everything."""
    found = outline(graph, cuts, marked)
    far = max((link.straggling for link in crew.links), key=lambda pace: abs(pace - 1))
    if far == 1.0 or not (len(marked) or (graph.tasks.after >= 0).any()):
        return found
    return with_slope(found, outline(slower(graph, far), cuts, marked), far)


def _planned(crew: Crew, bare: StepGraph, one: StepGraph | None, calls: list[int]) -> Outline:
    if one is None:
        return _outline(crew, bare, calls)
    bounds = np.searchsorted(bare.tasks.call, np.array(calls)).tolist()
    return _outline(crew, split_call(one, bounds), range(1, len(calls) + 1))


def _waiting(
    scene: Scene, crew: Crew, traced: Traced, graph: StepGraph
) -> tuple[np.ndarray, np.ndarray]:
    """Of traced collectives: what is not their transfer, and their transfer over the expected."""
    durations = graph.tasks.dur_ns[traced.tasks]
    if traced.buckets is None:
        return durations, np.zeros(len(durations))
    now = _transfers(scene, traced, crew.before)
    sizes = traced.buckets.size_bytes.astype(np.float64)
    expected = now.expected_ns(sizes) if now else np.zeros(len(sizes))
    moving = np.minimum(durations, expected)
    return durations - moving, moving / np.maximum(expected, 1.0)
