"""loader-workers=N: the DataLoader has N worker processes, or none (0)."""

from __future__ import annotations

import math

import msgspec
import numpy as np
from msgspec.structs import replace

from stepscope.explain.cpu_use import lost_to_others
from stepscope.predict.declaration import (
    NothingToChange,
    Outcome,
    Refused,
    WrongValue,
    changed,
)
from stepscope.predict.step_context import StepContext
from stepscope.predict.step_spans import without_waits
from stepscope.records.rank_facts import HostLoad, LoaderUse, Passing
from stepscope.step.graph import StepGraph
from stepscope.step.replay import step_ns
from stepscope.text.figures import milliseconds, significant
from stepscope.text.words import counted

# The mean step with another number of DataLoader workers. Times are nanoseconds.
#
# Without workers the training thread computes and makes each batch. With workers it computes and
# receives: a batch is handed over tensor by tensor, which on a small step costs more than making
# it. The step then lasts as long as the slowest of three: the training thread's own work, the
# workers' work shared among them, and all processor time shared among the free cores. Short epochs
# pay for starting and ending workers that do not persist.

# What handing a batch over costs, in units of one descriptor's (Passing.hand_over_ns): for the
# batch, for each tensor. Fitted to eleven scripts on two cores by benchmarks/loader_promises.py,
# where a unit was 0.055 ms; each script was captured with no workers and with two.
_RECEIVE = (12.0, 6.4)  # inside the training thread's fetch
_RECEIVE_CPU = (4.5, 4.9)  # of that, processor time
_AFTER = (9.0, 0.7)  # in the step: colder caches, freeing what was mapped
_SEND = (9.0, 4.8)  # in the worker, beyond making the batch in the training process
_SHARED_COLLATE = (1.0, 3.6)  # of that, inside making: torch's own collate fills shared memory
_READ_PAGES, _WRITE_PAGES = 1.4, 0.6  # of the measured pages
_START, _START_EACH = 36.0, 220.0  # creating the iterator, and for each worker
_FIRST = 290.0  # the first batch of new workers, beyond making it
_END_EACH = 140.0
_RESET = 60.0  # an epoch of workers that persist
_PAGE = 4096
_SHARPNESS = 4.0  # of the largest of three bounds: near each other they add up to 1.3 times one
_LEAST_COMPUTE = 0.6  # of what a step computes beside workers: the rest may be due to them

# On systems where capture could not try it.
USUAL_PASSING = Passing(hand_over_ns=40_000, write_page_ns=1_200, read_page_ns=600)

# Standard deviations, as shares of what is priced by the units above, of what is made elsewhere
# than it was measured, and of the whole step where processes crowd the cores.
PASSING_DOUBT, UNTRIED_DOUBT = 0.35, 0.6
_OTHER_COUNT_DOUBT = 0.4  # of the change, from some workers to another number of them
_MOST_MISSED = 2.0
_OTHERS_DOUBT = 0.5  # of the share of the cores that others have
_MAKING_DOUBT, _CROWDED_DOUBT, _LEAST_DOUBT = 0.15, 0.15, 0.06


class LoaderCosts(msgspec.Struct, frozen=True, kw_only=True):
    """One step's costs, as far as another number of workers needs them."""

    compute_ns: float  # the training thread's step without data, alone on its core
    compute_cores: float  # that it keeps busy meanwhile
    make_ns: float  # a step's batches, alone in the training process
    idle_ns: float  # of making: sleeping, reading files
    passes: Passing
    tensors: float  # of a step's batches
    pages: float
    batches: float = 1.0  # of a step
    epoch_steps: float | None = None  # None: one epoch
    persistent: bool = False
    cores: float = 1.0  # free for this rank and its workers
    others: float = 0.0  # cores that other processes keep busy
    passing_doubt: float = PASSING_DOUBT
    now: int = 0  # workers

    def unit(self, per_batch: float, per_tensor: float) -> float:
        """So many units for each batch and each tensor of a step."""
        return self.passes.hand_over_ns * (per_batch * self.batches + per_tensor * self.tensors)


class LoaderStep(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted step, and what it is made of."""

    step_ns: float
    thread_ns: float  # the training thread: computing, and receiving or making
    making_ns: float  # the workers' work over their number; 0 without
    crowd_ns: float  # all processor time over the free cores
    epoch_ns: float  # starting and ending workers, per step
    passing_ns: float  # of the training thread: what it does only because there are workers
    doubt: float  # standard deviation of the step's logarithm


def predict_workers(costs: LoaderCosts, workers: int, step_ns: float) -> LoaderStep:
    """The mean step with so many workers, where it now takes `step_ns`. With workers before and
    after, passing costs the same: what the model misses of the one it misses of the other."""
    step = _model_step(costs, workers)
    if not (costs.now and workers):
        return step
    now = _model_step(costs, costs.now)
    missed = min(max(step_ns / now.step_ns, 1 / _MOST_MISSED), _MOST_MISSED)
    change = abs(math.log(step.step_ns / now.step_ns))
    return msgspec.structs.replace(
        step,
        step_ns=missed * step.step_ns,
        doubt=math.hypot(_MAKING_DOUBT, _OTHER_COUNT_DOUBT * change),
    )


def _model_step(costs: LoaderCosts, workers: int) -> LoaderStep:
    if workers == 0:
        step_ns = max(1.0, costs.compute_ns + costs.make_ns)
        return LoaderStep(
            step_ns=step_ns,
            thread_ns=step_ns,
            making_ns=0.0,
            crowd_ns=0.0,
            epoch_ns=0.0,
            passing_ns=0.0,
            doubt=_doubt(costs, step_ns, workers, 0.0, crowded=0.0),
        )
    read_ns = _READ_PAGES * costs.passes.read_page_ns * costs.pages
    passing_ns = costs.unit(*_RECEIVE) + costs.unit(*_AFTER) + read_ns
    thread_ns = costs.compute_ns + passing_ns
    send_ns = costs.unit(*_SEND) + _WRITE_PAGES * costs.passes.write_page_ns * costs.pages
    making_ns = (costs.make_ns + send_ns) / workers
    used_ns = costs.compute_ns * costs.compute_cores + costs.unit(*_RECEIVE_CPU) + read_ns
    used_ns += costs.unit(*_AFTER) + costs.make_ns - costs.idle_ns + send_ns
    crowd_ns = used_ns / max(costs.cores, 0.5)
    steady_ns = max(1.0, _soft_max(thread_ns, making_ns, crowd_ns))
    epoch_ns = _epoch_ns(costs, workers, steady_ns)
    step_ns = steady_ns + epoch_ns
    priced_ns = (steady_ns - max(costs.compute_ns, making_ns * 0.5)) + epoch_ns
    return LoaderStep(
        step_ns=step_ns,
        thread_ns=thread_ns,
        making_ns=making_ns,
        crowd_ns=crowd_ns,
        epoch_ns=epoch_ns,
        passing_ns=passing_ns,
        doubt=_doubt(
            costs,
            step_ns,
            workers,
            min(priced_ns, passing_ns + epoch_ns),
            crowded=crowd_ns / steady_ns,
        ),
    )


def _soft_max(*bounds_ns: float) -> float:
    largest = max(bounds_ns)
    if largest <= 0:
        return 0.0
    total: float = sum((ns / largest) ** _SHARPNESS for ns in bounds_ns)
    return largest * math.pow(total, 1 / _SHARPNESS)


def _epoch_ns(costs: LoaderCosts, workers: int, steady_ns: float) -> float:
    """What an epoch's beginning and end take, for each of its steps."""
    if costs.epoch_steps is None:
        return 0.0
    unit = costs.passes.hand_over_ns
    if costs.persistent:
        ns = unit * _RESET
    else:
        ns = unit * (_START + _START_EACH * workers + _FIRST + _END_EACH * workers)
    first_ns = max(0.0, costs.make_ns / max(costs.batches, 1.0) - steady_ns)
    return (ns + first_ns) / max(1.0, costs.epoch_steps)


def _doubt(
    costs: LoaderCosts, step_ns: float, workers: int, priced_ns: float, *, crowded: float
) -> float:
    """Only what changes is in doubt: passing, making elsewhere, and how processes share cores."""
    passing = costs.passing_doubt * priced_ns / step_ns
    removed = costs.passing_doubt * costs.unit(*_AFTER) / step_ns if costs.now else 0.0
    moved = bool(costs.now) != bool(workers)
    making = _MAKING_DOUBT * min(1.0, costs.make_ns / step_ns) if moved else 0.0
    crowding = _CROWDED_DOUBT * crowded**2
    beside = _OTHERS_DOUBT * min(1.0, costs.others / (costs.others + costs.cores))
    return math.hypot(_LEAST_DOUBT, passing, removed, making, crowding, beside)


# From what was captured


def read_costs(
    loader: LoaderUse,
    passes: Passing | None,
    load: HostLoad | None,
    *,
    step_ns: float,
    data_ns: float,
    host_ns: float,
    batches: float,
) -> LoaderCosts | None:
    """None if too few batches were counted. `data_ns` of the mean step is spent in the loader, and
    the host is busy for `host_ns` of the rest."""
    if step_ns <= 0:
        return None
    units = passes or USUAL_PASSING
    compute_ns = step_ns - data_ns
    plain = load.plain if load else None
    waited_ns = (plain.training_waiting_ns or 0) / plain.steps if plain and plain.steps else 0.0
    waited_ns = min(waited_ns, 0.4 * step_ns)
    used = plain.used_cores if plain else None
    costs = LoaderCosts(
        compute_ns=compute_ns,
        compute_cores=1.0,
        make_ns=data_ns,
        idle_ns=0.0,
        passes=units,
        tensors=batches * loader.tensors,
        pages=batches * loader.batch_bytes / _PAGE,
        batches=batches,
        epoch_steps=loader.epoch_batches / batches if loader.epoch_batches else None,
        persistent=loader.persistent,
        cores=_free_cores(load),
        others=_others(load),
        passing_doubt=PASSING_DOUBT if passes else UNTRIED_DOUBT,
        now=loader.workers,
    )
    replace = msgspec.structs.replace
    if not loader.workers:
        wall_ns, cpu_ns = loader.fetch.mean_ns(), loader.fetch.mean_cpu_ns()
        if wall_ns is None or cpu_ns is None or wall_ns <= 0:
            return None
        asleep = max(0.0, 1 - cpu_ns / wall_ns)
        asleep = max(0.0, asleep * data_ns - waited_ns * data_ns / step_ns)
        busy_ns = (used or 1.0) * step_ns - (data_ns - asleep)
        compute_cores = busy_ns / host_ns if host_ns > 0 else 1.0
        return replace(costs, idle_ns=asleep, compute_cores=max(min(compute_cores, 64.0), 0.1))
    return _without_workers(costs, loader, used, step_ns, host_ns, waited_ns)


def _without_workers(
    costs: LoaderCosts,
    loader: LoaderUse,
    used: float | None,
    step_ns: float,
    host_ns: float,
    waited_ns: float,
) -> LoaderCosts | None:
    """From a run with workers: its step without what the workers add, and a batch as the training
    process would make it."""
    replace = msgspec.structs.replace
    making = loader.make
    wall_ns = making.mean_ns() if making else None
    cpu_ns = making.mean_cpu_ns() if making else None
    if making is None or wall_ns is None or cpu_ns is None:
        return None
    beside_ns = waited_ns * costs.compute_ns / step_ns
    worked_ns = costs.batches * making.process_ns / making.count
    beside_ns *= worked_ns / max(1.0, worked_ns + costs.others * step_ns)  # others stay
    after_ns = costs.unit(*_AFTER) + _READ_PAGES * costs.passes.read_page_ns * costs.pages
    compute_ns = max(_LEAST_COMPUTE * costs.compute_ns, costs.compute_ns - beside_ns - after_ns)
    core_wait_ns = making.core_wait_ns / making.count
    idle_ns = max(0.0, wall_ns - cpu_ns - core_wait_ns)
    own_ns = costs.batches * cpu_ns
    if loader.collated_at is None:
        shared_ns = costs.unit(*_SHARED_COLLATE)
        shared_ns += 2 * _WRITE_PAGES * costs.passes.write_page_ns * costs.pages
        own_ns = max(0.5 * own_ns, own_ns - shared_ns)
    compute_cores = 1.0
    if used is not None and host_ns > 0:
        compute_cores = (used * step_ns - costs.unit(*_RECEIVE_CPU)) / host_ns
    return replace(
        costs,
        compute_ns=compute_ns,
        compute_cores=min(max(compute_cores, 0.1), 64.0),
        make_ns=own_ns + costs.batches * idle_ns,
        idle_ns=costs.batches * idle_ns,
    )


def _free_cores(load: HostLoad | None) -> float:
    """Cores for one rank and its workers."""
    if load is None or not load.room:
        return 1.0
    return max(1.0, (load.room - _others(load)) / max(1, load.local_ranks or 1))


def _others(load: HostLoad | None) -> float:
    """Cores that other processes keep busy."""
    return lost_to_others(load.plain) if load and load.plain and load.plain.wall_ns else 0.0


_MOST = 1024
_TRIES = 6  # to find the gap that gives the step its length
_CLOSE = 0.001
_SEVERAL = 1.25  # batches per step: below this a step has one


def predict(context: StepContext, value: str) -> Outcome:
    """Refuses a trace without a captured loader, and a number that the loader has already."""
    workers = _count(value)
    loader = _loader(context, workers)
    costs, bare, stalls_ns = _read(context, loader)
    step = predict_workers(costs, workers, step_ns(context.graph) + context.stalls_ns)
    stalls = context.stalls.without(("data",)) if context.stalls else None
    graph = _with_length(bare, max(1.0, step.step_ns - stalls_ns))
    return Outcome(
        context=replace(changed(context, graph), stalls=stalls),
        assumptions=tuple(_assumptions(loader, costs, step, workers)),
        spread=0.0,
        doubt=step.doubt,
        doubt_is_whole=True,
    )


def _count(value: str) -> int:
    count = int(value) if value.isdecimal() and len(value) <= len(str(_MOST)) else _MOST + 1
    if count > _MOST:
        raise WrongValue(f"loader-workers={value}: give their number, such as 2, or 0 for none")
    return count


def _loader(context: StepContext, workers: int) -> LoaderUse:
    loader = context.analysis.inputs.loader
    if loader is None:
        raise Refused(
            "loader-workers: no DataLoader that feeds the training was captured. `stepscope "
            "run` captures it"
        )
    if loader.workers == workers:
        has = counted(workers, "worker") if workers else "no workers"
        raise NothingToChange(f"loader-workers={workers}: the DataLoader has {has} already")
    if loader.iterable and workers > max(1, loader.workers) and loader.workers < 2:
        raise Refused(
            f"loader-workers={workers}: {loader.dataset or 'the dataset'} is an "
            "IterableDataset. Every worker would yield all of it unless it takes its share "
            "(get_worker_info)"
        )
    return loader


def _read(context: StepContext, loader: LoaderUse) -> tuple[LoaderCosts, StepGraph, float]:
    """The costs, the typical step without data, and the stalls that are left of a mean step."""
    bare, saved_ns, _ = without_waits(context)
    stalls = context.stalls
    stalled_ns = stalls.cost_ns.get("data", 0.0) if stalls else 0.0
    data_ns = max(0.0, saved_ns) + stalled_ns
    whole_ns = step_ns(context.graph) + context.stalls_ns
    left_ns = context.stalls_ns - stalled_ns
    run = context.analysis.run
    inputs = context.analysis.inputs
    batches = loader.batches / run.steps if run and run.steps else 1.0
    host_ns = bare.host_ns + left_ns if context.on_host else float(bare.host_ns)
    costs = read_costs(
        loader,
        inputs.folder.data.passing if inputs.folder and inputs.folder.data else None,
        inputs.host_load,
        step_ns=whole_ns,
        data_ns=data_ns,
        host_ns=host_ns,
        batches=batches if batches >= _SEVERAL else 1.0,
    )
    if costs is None:
        raise Refused("loader-workers: too few batches were counted to know what one costs")
    return costs, bare, left_ns


def _with_length(graph: StepGraph, target_ns: float) -> StepGraph:
    """Lengthen the gap before the first call until the step takes so long; a step that is longer
    without any data keeps its length, unless workers made its own work longer."""
    calls = graph.calls
    if not len(calls):
        return graph
    length = step_ns(graph)
    if target_ns < length:
        return _scaled(graph, target_ns / length)
    longer = graph
    gap_ns = 0.0
    for _ in range(_TRIES):
        short_ns = target_ns - step_ns(longer)
        if short_ns <= _CLOSE * target_ns:
            break
        gap_ns += short_ns
        gaps = np.array(calls.gap_ns, np.float64)
        gaps[0] += gap_ns
        longer = replace(graph, calls=replace(calls, gap_ns=gaps))
    return longer


def _scaled(graph: StepGraph, factor: float) -> StepGraph:
    """The host's own time shrinks: workers had slowed it down."""
    from stepscope.step.correct import scale_host

    return scale_host(graph, factor)


def _assumptions(
    loader: LoaderUse, costs: LoaderCosts, step: LoaderStep, workers: int
) -> list[str]:
    """What the number of workers follows from."""
    made = f"making a step's batch takes {milliseconds(costs.make_ns / 1e6)}"
    if costs.idle_ns > 0.1 * costs.make_ns:
        made += f" ({milliseconds(costs.idle_ns / 1e6)} of it waits)"
    if not workers:
        return [f"{made}, in the training thread"]
    lines = [
        f"{made} in a worker. Receiving it takes {milliseconds(step.passing_ns / 1e6)} "
        "of the training thread"
    ]
    if step.crowd_ns >= max(step.thread_ns, step.making_ns):
        cores = significant(costs.cores)
        lines.append(f"training and {counted(workers, 'worker')} share {cores} free cores")
    if step.epoch_ns > 0.02 * step.step_ns:
        lines.append(
            f"starting workers for each epoch of {round(costs.epoch_steps or 0)} steps adds "
            f"{milliseconds(step.epoch_ns / 1e6)} to a step"
        )
    if costs.passing_doubt > 0.5:
        lines.append("the cost of passing a batch was not measured on this machine")
    if loader.iterable and workers:
        lines.append("the dataset is iterable only, so each worker must take its share of it")
    return lines
