"""Where steps and phases begin and end, seen from inside torch. Nothing here changes a result.

Code that torch.compile traces must not see any of it: every hook asks `is_compiling` first, which
is a constant there.
"""

from __future__ import annotations

import functools
import sys
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from stepscope.measure.after_import import when_imported
from stepscope.measure.harmless import harmless
from stepscope.measure.steps import ENTER, LEAVE

if TYPE_CHECKING:
    from stepscope.measure.session import Session


@harmless
def install(session: Session) -> None:
    """Attach to torch; called once, when torch has been imported."""
    session.torch_is_here()
    _watch_optimizers(session)
    _watch_backward(session)
    _watch_gradients(session)
    _watch_data_loader(session)
    _watch_grad_scaler(session)
    _watch_process_groups(session)
    _watch_profilers(session)
    if session.settings.step_on == "forward" or session.settings.nvtx:
        _watch_modules(session)


def _watch_optimizers(session: Session) -> None:
    from torch.compiler import is_compiling
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
        return None if is_compiling() else session.before_optimizer(optimizer, args, kwargs)

    def after(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not is_compiling():
            session.after_optimizer(optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _watch_backward(session: Session) -> None:
    """Tensor.backward looks torch.autograd.backward up at call time: the attribute is enough.

    Flat, because what runs behind a call finds the processor's caches empty (see steps.py).
    """
    import torch.autograd
    from torch.compiler import is_compiling

    original = torch.autograd.backward
    notes = session.notes

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        trains = get_ident() == session.thread
        if not session.passes_ended:
            trains = session.first_pass_begins()
        if trains:
            outermost = session.pass_begins(args, kwargs)
            notes.append((ENTER, perf_counter_ns(), "backward"))
            if session.listens:
                session.tell("backward", entering=True)
        try:
            return original(*args, **kwargs)
        finally:
            if trains:
                notes.append((LEAVE, perf_counter_ns(), "backward"))
                if session.listens:
                    session.tell("backward", entering=False)
                session.pass_ends(outermost)

    torch.autograd.backward = backward


def _watch_gradients(session: Session) -> None:
    """Gradients taken without .backward(): the only sign of a training in functional style."""
    import torch.autograd
    from torch.compiler import is_compiling

    original = torch.autograd.grad

    @functools.wraps(original)
    def grad(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not is_compiling() and session.passes is not None and not kwargs.get("create_graph"):
            session.gradient_was_taken()
        return result

    torch.autograd.grad = grad


def _watch_data_loader(session: Session) -> None:
    ends_steps = session.settings.step_on == "dataloader"
    notes = session.notes

    def attach(module: Any) -> None:
        from torch.compiler import is_compiling

        owner = module._BaseDataLoaderIter
        original = owner.__next__

        @functools.wraps(original)
        def following(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or get_ident() != session.thread:
                return original(*args, **kwargs)
            if ends_steps:
                session.boundary()
            notes.append((ENTER, perf_counter_ns(), "data"))
            if session.listens:
                session.tell("data", entering=True)
            try:
                return original(*args, **kwargs)
            finally:
                notes.append((LEAVE, perf_counter_ns(), "data"))
                if session.listens:
                    session.tell("data", entering=False)

        owner.__next__ = following

    when_imported("torch.utils.data.dataloader", attach)


def _watch_grad_scaler(session: Session) -> None:
    """A step that GradScaler skips (inf or nan) is a step all the same: its time was spent."""

    def attach(module: Any) -> None:
        original = module.GradScaler.step

        @functools.wraps(original)
        def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = session.optimizer_calls
            result = original(self, optimizer, *args, **kwargs)
            if session.optimizer_calls == before:
                session.step_was_skipped()
            return result

        module.GradScaler.step = step

    when_imported("torch.amp.grad_scaler", attach)


def _watch_modules(session: Session) -> None:
    """Costs a call per module: only for scripts that asked for it."""
    from torch.compiler import is_compiling
    from torch.nn.modules.module import (
        register_module_forward_hook,
        register_module_forward_pre_hook,
    )

    ends_steps = session.settings.step_on == "forward"
    depth = 0

    def before(module: Any, _args: Any) -> None:
        nonlocal depth
        if is_compiling():
            return
        if get_ident() == session.thread:
            # Inside backward it is a checkpoint that computes its part again.
            if depth == 0 and ends_steps and not session.in_backward:
                session.boundary()
            depth += 1
        session.module_begins(module)

    def after(module: Any, _args: Any, _output: Any) -> None:
        nonlocal depth
        if is_compiling():
            return
        if get_ident() == session.thread:
            depth = max(0, depth - 1)
        session.module_ends(module)

    register_module_forward_pre_hook(before)
    register_module_forward_hook(after, always_call=True)


def _watch_profilers(session: Session) -> None:
    """A script that profiles itself comes first, from its warm-up on."""
    from torch.autograd import profiler

    prepare, leave = profiler.profile._prepare_trace, profiler.profile.__exit__

    @functools.wraps(prepare)
    def _prepare_trace(self: Any, *args: Any, **kwargs: Any) -> Any:
        session.profiler_begins(self)
        return prepare(self, *args, **kwargs)

    @functools.wraps(leave)
    def __exit__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        try:
            return leave(self, *args, **kwargs)
        finally:
            session.profiler_ended(self)

    profiler.profile._prepare_trace = _prepare_trace
    profiler.profile.__exit__ = __exit__


def _watch_process_groups(session: Session) -> None:
    def attach(module: Any) -> None:
        original = module.destroy_process_group

        @functools.wraps(original)
        def destroy(*args: Any, **kwargs: Any) -> Any:
            session.group_ends()
            return original(*args, **kwargs)

        module.destroy_process_group = destroy
        package = sys.modules.get("torch.distributed")
        if package is not None and getattr(package, "destroy_process_group", None) is original:
            package.destroy_process_group = destroy  # type: ignore[attr-defined]

    when_imported("torch.distributed.distributed_c10d", attach)
