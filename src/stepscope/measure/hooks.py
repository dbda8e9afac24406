"""Where steps and phases begin and end, seen from inside torch. Nothing here changes a result."""

from __future__ import annotations

import functools
import sys
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from stepscope.measure.harmless import harmless, note
from stepscope.measure.steps import ENTER, LEAVE

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.measure.session import Session


@harmless
def install(session: Session) -> None:
    """Attach to torch; called once, when torch has been imported."""
    session.torch_is_here()
    _watch_optimizers(session)
    _watch_backward(session)
    _watch_data_loader(session)
    _watch_grad_scaler(session)
    _watch_process_groups(session)
    _watch_profilers(session)
    if session.settings.step_on == "forward" or session.settings.nvtx:
        _watch_modules(session)


def _watch_optimizers(session: Session) -> None:
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    register_optimizer_step_pre_hook(session.before_optimizer)
    register_optimizer_step_post_hook(session.after_optimizer)


def _watch_backward(session: Session) -> None:
    import torch.autograd

    _around(torch.autograd, "backward", session, "backward")
    # Tensor.backward looks torch.autograd.backward up at call time; the module attribute is enough.


def _watch_data_loader(session: Session) -> None:
    then = session.step_ends if session.settings.step_on == "dataloader" else None

    def attach(module: Any) -> None:
        _around(module._BaseDataLoaderIter, "__next__", session, "data", then=then)

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
    from torch.nn.modules.module import (
        register_module_forward_hook,
        register_module_forward_pre_hook,
    )

    depth = 0

    @harmless
    def before(module: Any, args: Any) -> None:
        nonlocal depth
        del args
        if depth == 0:
            session.outermost_forward_begins()
        depth += 1
        session.module_begins(module)

    @harmless
    def after(module: Any, args: Any, output: Any) -> None:
        nonlocal depth
        del args, output
        depth = max(0, depth - 1)
        session.module_ends(module)

    register_module_forward_pre_hook(before)
    register_module_forward_hook(after, always_call=True)


def _watch_profilers(session: Session) -> None:
    """A script that profiles itself comes first."""
    from torch.autograd import profiler

    original = profiler.profile._prepare_trace

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        session.profiler_wanted(self)
        return original(self, *args, **kwargs)

    profiler.profile._prepare_trace = prepare


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


def _around(
    owner: Any,
    name: str,
    session: Session,
    phase: str,
    then: Callable[[], None] | None = None,
) -> None:
    """Time every call of owner.name as a phase; arguments, results and errors pass untouched.

    Flat, because what runs behind a call finds the processor's caches empty (see steps.py).
    """
    original = getattr(owner, name)
    notes = session.notes

    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        trains = get_ident() == session.thread
        if trains:
            notes.append((ENTER, perf_counter_ns(), phase))
            if session.listens:
                session.tell(phase, entering=True)
        try:
            return original(*args, **kwargs)
        finally:
            if trains:
                notes.append((LEAVE, perf_counter_ns(), phase))
                if session.listens:
                    session.tell(phase, entering=False)
            if then is not None:
                then()

    setattr(owner, name, timed)


def when_imported(name: str, action: Callable[[Any], None]) -> None:
    """Run action(module) now if the module is there, else right after its import."""

    def safely(module: Any) -> None:
        try:
            action(module)
        except Exception as error:
            note(f"hooking {name}", error)

    if name in sys.modules:
        safely(sys.modules[name])
        return
    sys.meta_path.insert(0, _AfterImport(name, safely))


class _AfterImport:
    """A finder that lets the normal machinery import one module, then acts once."""

    def __init__(self, name: str, action: Callable[[Any], None]) -> None:
        self.name, self.action = name, action

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        import importlib.util

        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader, action = spec.loader, self.action
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            action(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
