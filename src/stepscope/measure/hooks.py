"""Where steps and phases begin and end, seen from inside torch. Nothing here changes a result.

Code that torch.compile traces must see none of it (see dynamo.py): replacements that it traces
anyway ask `is_compiling` first, which is a constant there.
"""

from __future__ import annotations

import functools
import sys
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from stepscope.measure.after_import import when_imported
from stepscope.measure.attached import replace, when_detached
from stepscope.measure.dynamo import (
    is_tracing,
    know_as_unpatched,
    skip_our_frames,
    surrounds,
    untraced,
)
from stepscope.measure.graph_steps import watch_graph_steps
from stepscope.measure.leaving import watch_leaving
from stepscope.measure.loader_hooks import watch_data_loaders
from stepscope.measure.never_raise import never_raise
from stepscope.measure.rare_phases import watch_rare_phases
from stepscope.measure.step_notes import ENTER, LEAVE

if TYPE_CHECKING:
    from stepscope.measure.session import Session
    from stepscope.measure.trial import TrialLog

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
    if session.settings.step_on == "forward" or session.settings.nvtx:
        _watch_modules(session)


def _watch_optimizers(session: Session) -> None:
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    @untraced
    def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
        return session.before_optimizer(optimizer, args, kwargs)

    @untraced
    def after(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        session.after_optimizer(optimizer)

    when_detached(register_optimizer_step_pre_hook(before).remove)
    when_detached(register_optimizer_step_post_hook(after).remove)


def _watch_engine(session: Session) -> None:
    """Replace the call of autograd's engine below torch.autograd.backward and torch.autograd.grad.

    torch.compile knows those two by name and traces into neither, so they stay unchanged. The code
    is flat, because calls are expensive while the processor's caches are cold (see steps.py).
    """
    import torch.autograd.graph

    original = torch.autograd.graph._engine_run_backward
    notes = session.notes

    @surrounds
    @functools.wraps(original)
    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            return original(outputs, *args, **kwargs)
        if not kwargs.get("accumulate_grad"):
            result = original(outputs, *args, **kwargs)
            if not _creates_graph(args) and not session.in_backward:
                if session.trial is not None and get_ident() == session.thread:
                    session.trial.gradient_was_taken(outputs, session.number)
                session.gradient_was_taken()
            return result
        trains = get_ident() == session.thread
        if not session.passes_ended:
            trains = session.first_pass_begins()
        if trains:
            outermost = session.pass_begins(outputs)
            if session.trial is not None and outermost:
                session.trial.pass_begins(outputs, session.number)
            notes.append((ENTER, perf_counter_ns(), "backward"))
            if session.phases_wanted:
                session.phase_changes("backward", entering=True)
        try:
            return original(outputs, *args, **kwargs)
        finally:
            if trains:
                notes.append((LEAVE, perf_counter_ns(), "backward"))
                if session.phases_wanted:
                    session.phase_changes("backward", entering=False)
                session.pass_ends(outermost)

    # torch.autograd holds a name of its own for it; tracers replace and restore both.
    replace(torch.autograd, "_engine_run_backward", run_backward)
    replace(torch.autograd.graph, "_engine_run_backward", run_backward)


def _creates_graph(args: tuple[Any, ...]) -> bool:
    """Gradients that will be differentiated again are part of a loss."""
    return len(args) > _CREATE_GRAPH and bool(args[_CREATE_GRAPH])


def _watch_grad_scaler(session: Session) -> None:
    """A step that GradScaler skips (inf or nan) still counts: its time was spent."""

    def attach(module: Any) -> None:
        from torch.compiler import is_compiling

        if session.trial is not None:
            _watch_scaling(session.trial, module.GradScaler)
        original = module.GradScaler.step

        @surrounds
        @functools.wraps(original)
        def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(self, optimizer, *args, **kwargs)
            before = session.optimizers.calls
            result = original(self, optimizer, *args, **kwargs)
            if session.optimizers.calls == before:
                session.step_was_seen(skipped=True)
            return result

        replace(module.GradScaler, "step", step)

    when_imported("torch.amp.grad_scaler", attach)


def _watch_scaling(trial: TrialLog, owner: Any) -> None:
    original = owner.scale

    @surrounds
    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        result = original(self, outputs)
        trial.scaled(outputs, result)
        return result

    replace(owner, "scale", scale)


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

    @surrounds
    @functools.wraps(original)
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

    replace(Module, "_call_impl", call)
    know_as_unpatched(original, call)
    when_detached(lambda: know_as_unpatched(call, original))


def _watch_profilers(session: Session) -> None:
    """A script's own profiler has priority, from its warm-up on."""
    from torch.autograd import profiler

    prepare, leave = profiler.profile._prepare_trace, profiler.profile.__exit__

    @surrounds
    @functools.wraps(prepare)
    def _prepare_trace(self: Any, *args: Any, **kwargs: Any) -> Any:
        session.profiler_begins(self)
        return prepare(self, *args, **kwargs)

    @surrounds
    @functools.wraps(leave)
    def __exit__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        try:
            return leave(self, *args, **kwargs)
        finally:
            session.profiler_ended(self)

    replace(profiler.profile, "_prepare_trace", _prepare_trace)
    replace(profiler.profile, "__exit__", __exit__)


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
