"""Where steps and phases begin and end, seen from inside torch: optimizers, autograd's
engine, scalers, modules, profilers, process groups, data loaders, rare phases, CUDA
graphs. Nothing here changes a result.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from stepscope.measure.cuda_graphs import gate
from stepscope.measure.loader_hooks import watch_data_loaders
from stepscope.measure.never_raise import never_raise, note
from stepscope.measure.patches import (
    LeftAlone,
    is_tracing,
    know_as_unpatched,
    replace,
    skip_our_frames,
    surrounds,
    untraced,
    when_detached,
    when_imported,
    wrap,
)
from stepscope.measure.processes import is_child, watch_leaving
from stepscope.measure.ranks import rank_and_world
from stepscope.measure.steps.phases import (
    ENTER,
    GRAPHS,
    LEAVE,
    MODE,
)

if TYPE_CHECKING:
    from stepscope.measure.session.session import Session
    from stepscope.measure.session.trial import TrialLog

# Code that torch.compile traces must see none of it (see patches.py): replacements that it traces
# anyway ask `is_compiling` first, which is a constant there.

_ENGINE = "_engine_run_backward"
_CREATE_GRAPH = 2  # its place among the engine's arguments after the outputs


@never_raise
def install(session: Session) -> None:
    """Attach to torch; called once, when torch has been imported."""
    skip_our_frames()
    session.torch_is_here()
    _watch_optimizers(session)
    _watch_engine(session)
    watch_data_loaders(session)
    _watch_grad_scaler(session)
    watch_graph_steps(session)
    _watch_process_groups(session)
    _watch_profilers(session)
    watch_rare_phases(session)
    watch_leaving(session)
    if is_child() or {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        session.hang.start()  # perhaps a rank: others may wait for it from its start on
    if session.settings.step_on == "forward" or session.settings.nvtx:
        _watch_modules(session)


def _watch_optimizers(session: Session) -> None:
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    pace = session.pace
    passing, ends, others, seen = pace.passing, pace.ends, pace.others, pace.seen
    append = ends.append

    # Steps that are not noted (pace.py) end here, without any further call.

    @untraced
    def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
        return None if passing.quiet else session.before_optimizer(optimizer, args, kwargs)

    @untraced
    def after(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if passing.on and optimizer is passing.anchor():
            append(perf_counter_ns())
            if seen:
                seen.clear()
            if len(ends) >= passing.room:
                session.stretch_ends()
        elif passing.on and id(optimizer) in others and id(optimizer) not in seen:
            seen[id(optimizer)] = perf_counter_ns()
        else:
            session.after_optimizer(optimizer)

    when_detached(register_optimizer_step_pre_hook(before).remove)
    when_detached(register_optimizer_step_post_hook(after).remove)


def _watch_engine(session: Session) -> None:
    """Replace the call of autograd's engine below torch.autograd.backward and torch.autograd.grad.

    torch.compile knows those two by name and traces into neither, so they stay unchanged. The code
    is flat, because calls are expensive while the processor's caches are cold (see phases.py).
    """
    import torch.autograd.graph

    original = torch.autograd.graph._engine_run_backward
    notes, passing = session.notes, session.pace.passing

    @surrounds
    @functools.wraps(original)
    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if passing.on:
            return _unnoted_pass(session, original, outputs, args, kwargs)
        if is_tracing():
            return original(outputs, *args, **kwargs)
        called = perf_counter_ns()
        if not kwargs.get("accumulate_grad"):
            result = original(outputs, *args, **kwargs)
            if not (len(args) > _CREATE_GRAPH and bool(args[_CREATE_GRAPH])):
                _gradient_was_taken(session, outputs)
            return result
        trains = get_ident() == session.thread
        if not session.passes_ended:
            trains = session.first_pass_begins()
        if trains:
            outermost = session.pass_begins(outputs)
            if session.trial is not None and outermost:
                session.trial.pass_begins(outputs, session.number)
            now = perf_counter_ns()
            notes.append((ENTER, now, "backward"))
            session.own_ns += now - called
            if session.phases_wanted:
                session.phase_changes("backward", entering=True)
        try:
            return original(outputs, *args, **kwargs)
        finally:
            if trains:
                _pass_ends(session, outermost)

    # torch.autograd holds a name of its own for it; tracers replace and restore both.
    for place in (torch.autograd, torch.autograd.graph):
        _replace_engine(session, place, original, run_backward)


def _pass_ends(session: Session, outermost: bool) -> None:
    now = perf_counter_ns()
    session.notes.append((LEAVE, now, "backward"))
    if session.phases_wanted:
        session.phase_changes("backward", entering=False)
    session.pass_ends(outermost)
    session.own_ns += perf_counter_ns() - now


def _replace_engine(session: Session, place: Any, original: Any, replacement: Any) -> None:
    """Not in every step: but where others train, a long pass waits for them, so each is timed."""
    replace(place, _ENGINE, replacement)
    if rank_and_world()[1] == 1:
        left = LeftAlone(place, _ENGINE, original, replacement)
        session.engines.append(left)
        when_detached(left.come_back)


def _gradient_was_taken(session: Session, outputs: Any) -> None:
    """By torch.autograd.grad, and no gradient of it will be."""
    if session.in_backward:
        return
    if session.trial is not None and get_ident() == session.thread:
        session.trial.gradient_was_taken(outputs, session.number)
    session.gradient_was_taken()


def _unnoted_pass(session: Session, original: Any, outputs: Any, args: Any, kwargs: Any) -> Any:
    """In a step that is not noted, unless the pass takes long."""
    if session.passes is not None and get_ident() == session.thread:
        outermost = session.unnoted_pass_begins(outputs)
        try:
            return original(outputs, *args, **kwargs)
        finally:
            session.unnoted_pass_ends(outermost)
    began = perf_counter_ns()
    result = original(outputs, *args, **kwargs)
    ended = perf_counter_ns()
    if ended - began > session.pace.limit and session.pace.passing.here:
        session.note_from_here(began)
        session.notes.append((ENTER, began, "backward"))
        session.notes.append((LEAVE, ended, "backward"))
    return result


def _watch_grad_scaler(session: Session) -> None:
    """A step that GradScaler skips (inf or nan) still counts: its time was spent."""

    def attach(module: Any) -> None:
        from torch.compiler import is_compiling

        if session.trial is not None:
            _watch_scaling(session.trial, module.GradScaler)
        original = module.GradScaler.step

        def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(self, optimizer, *args, **kwargs)
            before = session.optimizers.calls + session.number
            result = original(self, optimizer, *args, **kwargs)
            if session.optimizers.calls + session.number == before:
                session.step_was_seen(skipped=True)
            return result

        wrap(module.GradScaler, "step", step)

    when_imported("torch.amp.grad_scaler", attach)


def _watch_scaling(trial: TrialLog, owner: Any) -> None:
    original = owner.scale

    def scale(self: Any, outputs: Any) -> Any:
        result = original(self, outputs)
        trial.scaled(outputs, result)
        return result

    wrap(owner, "scale", scale)


def _watch_modules(session: Session) -> None:
    """Costs a call per module: only when requested.

    torch's global hooks will not do: dynamo traces modules with hooks differently, and takes the
    graph's inputs in another order.
    """
    from torch.compiler import is_compiling
    from torch.nn import Module

    ends_steps = session.settings.step_on == "forward"
    ranges = session.ranges
    original = Module._call_impl
    depth = 0

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if is_compiling():
            return original(self, *args, **kwargs)
        trains = get_ident() == session.thread
        # Inside backward, a checkpoint recomputes its part.
        if trains and depth == 0 and ends_steps and not session.in_backward:
            session.boundary()
        depth += trains
        if ranges is not None:
            ranges.push(type(self).__name__)
        try:
            return original(self, *args, **kwargs)
        finally:
            depth -= trains
            if ranges is not None:
                ranges.pop()

    wrap(Module, "_call_impl", call)
    know_as_unpatched(original, call)
    when_detached(lambda: know_as_unpatched(call, original))


def _watch_profilers(session: Session) -> None:
    """A script's own profiler has priority, from its warm-up on."""
    from torch.autograd import profiler

    prepare, leave = profiler.profile._prepare_trace, profiler.profile.__exit__

    def _prepare_trace(self: Any, *args: Any, **kwargs: Any) -> Any:
        session.windows.profiler_begins(self)
        return prepare(self, *args, **kwargs)

    def __exit__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        try:
            return leave(self, *args, **kwargs)
        finally:
            session.windows.profiler_ends(self)

    wrap(profiler.profile, "_prepare_trace", _prepare_trace)
    wrap(profiler.profile, "__exit__", __exit__)


def _watch_process_groups(session: Session) -> None:
    def attach(module: Any) -> None:
        destroys, initialises = module.destroy_process_group, module.init_process_group

        @surrounds
        @functools.wraps(destroys)
        def destroy(*args: Any, **kwargs: Any) -> Any:
            session.group_ends()
            return destroys(*args, **kwargs)

        @surrounds
        @functools.wraps(initialises)
        def initialise(*args: Any, **kwargs: Any) -> Any:
            began = perf_counter_ns()
            session.hang.start()
            try:
                return initialises(*args, **kwargs)
            finally:
                session.start_up.group_took(perf_counter_ns() - began)

        _replace_everywhere(destroys, destroy)
        _replace_everywhere(initialises, initialise)

    when_imported("torch.distributed.distributed_c10d", attach)


def _replace_everywhere(original: Any, replacement: Any) -> None:
    """In all of torch.distributed's modules that hold the function by its name."""
    name = original.__name__
    for path, module in list(sys.modules.items()):
        if (
            path.startswith("torch.distributed")
            and getattr(module, "__dict__", {}).get(name) is original
        ):
            replace(module, name, replacement)


# Training steps inside of CUDA graphs.
#
# A graph that recorded an optimizer's step trains whenever it is replayed: each replay ends a step.
# While it is captured nothing trains, so an optimizer that steps then ends none. The gate is told
# of every capture.

_CALLS = "_stepscope_calls"  # attributes of a graph: optimizers' steps before its capture,
_TRAINS = "_stepscope_trains"  # and whether it recorded one
_METHODS = ("capture_begin", "capture_end", "replay")
_MAKER = "make_graphed_callables"


class _Preparation:
    """A call of make_graphed_callables."""


def watch_graph_steps(session: Session) -> None:
    when_imported("torch.cuda.graphs", functools.partial(_watch, session))


def _watch(session: Session, module: Any) -> None:
    graph: Any = getattr(module, "CUDAGraph", None)
    if any(getattr(graph, name, None) is None for name in _METHODS):
        note("graph steps", "this version of torch replays graphs in another way")
        return
    begin, end, again = (getattr(graph, name) for name in _METHODS)

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        _begins(session, self)
        try:
            return begin(self, *args, **kwargs)
        except BaseException:
            gate.end(self)
            raise

    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(self, *args, **kwargs)
        finally:
            _ends(session, self)

    def replay(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = again(self, *args, **kwargs)
        if getattr(self, _TRAINS, False):
            session.step_was_seen()
        return result

    for name, replacement in zip(_METHODS, (capture_begin, capture_end, replay), strict=True):
        wrap(graph, name, replacement)
    _watch_maker(session, module)


@never_raise
def _watch_maker(session: Session, module: Any) -> None:
    """It runs passes before it captures, which train nothing."""
    original = getattr(module, _MAKER, None)
    if original is None:
        return

    @surrounds
    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if session.pace.passing.here:
            session.note_from_here()
        call = _Preparation()
        gate.begin(call)
        try:
            return original(*args, **kwargs)
        finally:
            gate.end(call)

    for owner in (module, sys.modules.get(module.__name__.rpartition(".")[0])):
        if getattr(owner, _MAKER, None) is original:
            replace(owner, _MAKER, make)


@never_raise
def _begins(session: Session, graph: Any) -> None:
    if session.pace.passing.here:
        session.note_from_here()
    gate.begin(graph)
    setattr(graph, _CALLS, session.optimizers.calls)


@never_raise
def _ends(session: Session, graph: Any) -> None:
    gate.end(graph)
    setattr(graph, _TRAINS, session.optimizers.calls > getattr(graph, _CALLS))


# What else a training thread does inside a step: evaluates, saves, collects garbage, compiles.
#
# Each is noted where it begins and ends, like the phases of every step (phases.py). None of
# these calls is frequent, so none costs a step anything when it does not happen.

SHORTEST_COLLECTION_NS = 100_000  # shorter ones stay in the phase around them
# Where checkpoints are written: module, and function or method. One inside another counts once.
# Lightning saves to memory first, then to its file.
SAVING = (
    ("torch.serialization", "save"),
    ("torch.distributed.checkpoint.state_dict_saver", "save"),
    ("torch.distributed.checkpoint.state_dict_saver", "async_save"),
    ("lightning.fabric.utilities.cloud_io", "_atomic_save"),
    ("lightning_fabric.utilities.cloud_io", "_atomic_save"),
    ("safetensors.torch", "save_file"),
    ("safetensors.numpy", "save_file"),
    ("pickle", "dump"),
    *(
        (module, function)
        for module in ("numpy.lib._npyio_impl", "numpy.lib.npyio")  # numpy 2, numpy 1
        for function in ("save", "savez", "savez_compressed")
    ),
    ("joblib.numpy_pickle", "dump"),
    ("transformers.trainer", "Trainer._save_checkpoint"),
    ("transformers.modeling_utils", "PreTrainedModel.save_pretrained"),
    ("accelerate.accelerator", "Accelerator.save_state"),
)


@never_raise
def watch_rare_phases(session: Session) -> None:
    """Attach to torch and to Python's collector; once, when torch has been imported."""
    _watch_collector(session)
    _watch_modes(session)
    for module, function in SAVING:
        when_imported(module, functools.partial(_watch_saving, session, function))
    session.compiler.attach()
    when_imported("torch._dynamo.callback", functools.partial(_watch_compiler, session))


def _watch_collector(session: Session) -> None:
    """Both notes are written when a collection ends: it is too short for any other to come."""
    notes = session.notes
    began = 0

    def collecting(phase: str, _info: dict[str, int]) -> None:
        nonlocal began
        if get_ident() != session.thread:
            return
        now = perf_counter_ns()
        if phase == "start":
            began = now
        elif began and now - began >= SHORTEST_COLLECTION_NS:
            session.note_from_here(began)
            notes.append((ENTER, began, "gc"))
            notes.append((LEAVE, now, "gc"))

    gc.callbacks.append(collecting)
    when_detached(lambda: gc.callbacks.remove(collecting))


def _watch_modes(session: Session) -> None:
    """`eval()` is `train(False)`, and both call the same of every module inside."""
    from torch.compiler import is_compiling
    from torch.nn import Module

    original = Module.train
    notes, passing = session.notes, session.pace.passing
    inside = False

    def train(self: Any, mode: bool = True) -> Any:
        nonlocal inside
        if inside or is_compiling() or get_ident() != session.thread:
            return original(self, mode)
        if passing.on:
            if mode:  # it trains already
                return original(self, mode)
            session.note_from_here()
        inside = True
        try:
            return original(self, mode)
        finally:
            inside = False
            notes.append((MODE, perf_counter_ns(), bool(mode)))

    wrap(Module, "train", train)


def _watch_saving(session: Session, name: str, module: Any) -> None:
    inside, _, name = name.rpartition(".")
    owner = getattr(module, inside, None) if inside else module
    original = getattr(owner, name, None)
    if original is None:
        return
    saving = _as_phase(session, original, "checkpoint")
    replace(owner, name, saving)
    for package in _packages_above(module.__name__):
        if vars(package).get(name) is original:
            replace(package, name, saving)


def _packages_above(module: str) -> list[Any]:
    """They may hold the module's functions by the same name."""
    parts = module.split(".")
    names = [".".join(parts[:length]) for length in range(1, len(parts))]
    return [sys.modules[name] for name in names if name in sys.modules]


def _as_phase(session: Session, original: Callable[..., Any], phase: str) -> Callable[..., Any]:
    from torch.compiler import is_compiling

    notes = session.notes

    @surrounds
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or get_ident() != session.thread:
            return original(*args, **kwargs)
        session.note_from_here()
        notes.append((ENTER, perf_counter_ns(), phase))
        try:
            return original(*args, **kwargs)
        finally:
            notes.append((LEAVE, perf_counter_ns(), phase))

    return call


def _watch_compiler(session: Session, module: Any) -> None:
    """Dynamo says itself when it begins to compile and when it has ended."""
    notes = session.notes
    handler = module.callback_handler
    before = 0

    def begins(*args: Any) -> None:
        nonlocal before
        session.compiler.begins(getattr(args[0], "compile_id", None) if args else None)
        if get_ident() == session.thread:
            session.note_from_here()
            before = _graphs_compiled()
            notes.append((ENTER, perf_counter_ns(), "compile"))

    def ends(*args: Any) -> None:
        session.compiler.look(getattr(args[0], "compile_id", None) if args else None)
        if get_ident() == session.thread:
            now = perf_counter_ns()
            notes.append((LEAVE, now, "compile"))
            graphs = _graphs_compiled() - before
            if graphs > 0:
                notes.append((GRAPHS, now, graphs))

    def register() -> None:
        handler.register_start_callback(begins)
        handler.register_end_callback(ends)

    clear = handler.clear

    def cleared(*args: Any, **kwargs: Any) -> Any:
        """`torch._dynamo.reset` removes all callbacks."""
        try:
            return clear(*args, **kwargs)
        finally:
            register()

    def unregister() -> None:
        handler.remove_start_callback(begins)
        handler.remove_end_callback(ends)

    register()
    when_detached(unregister)
    wrap(handler, "clear", cleared)


@never_raise
def _graph_counter() -> int:
    counters: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters.get("stats", {}).get("unique_graphs", 0))


def _graphs_compiled() -> int:
    return _graph_counter() or 0
