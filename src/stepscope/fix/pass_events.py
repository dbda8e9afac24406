"""Backward passes and optimizer steps, as they begin and end."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class PassEvents:
    """Attaches to torch only where somebody listens."""

    def __init__(self, surrounds: Callable[[Any], Any]) -> None:
        self._surrounds = surrounds
        self._before: list[Callable[[Any], Any]] = []
        self._after: list[Callable[[], None]] = []
        self._before_graph_is_freed: list[Callable[[Any], None]] = []
        self._attached = False
        self._depth = 0

    def before(self, act: Callable[[Any], Any]) -> None:
        self._attach()
        self._before.append(act)

    def after(self, act: Callable[[], None]) -> None:
        self._attach()
        self._after.append(act)

    def before_graph_is_freed(self, act: Callable[[Any], None]) -> None:
        """Before torch.autograd.grad, if it lets the graph go."""
        self._attach()
        self._before_graph_is_freed.append(act)

    def before_step(self, act: Callable[[Any], None]) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(_untraced(lambda optimizer, _args, _kw: act(optimizer)))

    def before_step_call(self, act: Callable[[Sequence[Any], dict[str, Any]], None]) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(
            _untraced(lambda _optimizer, args, kwargs: act(args[1:], kwargs))
        )

    def after_step(self, act: Callable[[Any], None]) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(_untraced(lambda optimizer, _args, _kw: act(optimizer)))

    def _attach(self) -> None:
        if self._attached:
            return
        self._attached = True
        import torch.autograd.graph
        from torch._guards import TracingContext

        original = torch.autograd.graph._engine_run_backward

        @self._surrounds
        @functools.wraps(original)
        def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth or TracingContext.try_get():
                return original(outputs, *args, **kwargs)
            if not kwargs.get("accumulate_grad"):
                if _frees_graph(args):
                    for act in self._before_graph_is_freed:
                        act(outputs)
                return original(outputs, *args, **kwargs)
            self._depth += 1
            try:
                for begin in self._before:
                    changed = begin(outputs)
                    outputs = outputs if changed is None else changed
                return original(outputs, *args, **kwargs)
            finally:
                self._depth -= 1
                for end in self._after:
                    end()

        torch.autograd._engine_run_backward = run_backward
        torch.autograd.graph._engine_run_backward = run_backward


def _frees_graph(args: Sequence[Any]) -> bool:
    """By what follows the outputs: their gradients, retain_graph, create_graph."""
    return len(args) > 2 and not (args[1] or args[2])


def _untraced(hook: Any) -> Any:
    """torch.compile traces an empty function instead, where it compiles the optimizer's step."""
    hook._torchdynamo_inline = _nothing
    return hook


def _nothing(*_args: Any) -> None:
    return None
