"""Where steps and phases begin and end, seen from inside torch. Nothing here changes a result.

A step ends when the anchor, the first optimizer seen to step, has stepped. Other optimizers that
step in between (a GAN's second one) belong to the same step. When another optimizer steps twice
while the anchor does not, it becomes the anchor.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

from stepscope.measure.harmless import harmless, note

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.measure.session import Session


class Anchor:
    """Decides which optimizer steps end a training step."""

    def __init__(self) -> None:
        self._anchor: weakref.ref[Any] | None = None
        self._others: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def ends_step(self, optimizer: Any) -> bool:
        """Call once for every optimizer step."""
        anchor = self._anchor() if self._anchor else None
        if anchor is None or anchor is optimizer:
            self._anchor = weakref.ref(optimizer)
            self._others.clear()
            return True
        self._others[optimizer] = self._others.get(optimizer, 0) + 1
        if self._others[optimizer] >= 2:
            self._anchor = weakref.ref(optimizer)
            self._others.clear()
            return True
        return False


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

    anchor = Anchor()
    depth = 0

    @harmless
    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal depth
        del args, kwargs
        depth += 1
        if depth == 1:
            session.sees_optimizer(optimizer)
            session.enter("optimizer")

    @harmless
    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal depth
        del args, kwargs
        depth = max(0, depth - 1)
        if depth:  # an optimizer that wraps another one
            return
        session.leave("optimizer")
        if session.settings.step_on == "optimizer" and anchor.ends_step(optimizer):
            session.step_ends()

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _watch_backward(session: Session) -> None:
    import torch.autograd

    _around(torch.autograd, "backward", session, "backward")
    # Tensor.backward looks torch.autograd.backward up at call time; the module attribute is enough.


def _watch_data_loader(session: Session) -> None:
    def attach(module: Any) -> None:
        _around(
            module._BaseDataLoaderIter,
            "__next__",
            session,
            "data",
            then=session.sees_batch,
        )

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
    """Time every call of owner.name as a phase; arguments, results and errors pass untouched."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        session.enter(phase)
        try:
            return original(*args, **kwargs)
        finally:
            session.leave(phase)
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
