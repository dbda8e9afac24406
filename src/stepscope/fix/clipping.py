"""Calls of torch's functions that clip gradients."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_NAMES = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_grads_with_norm_")


class Clipping:
    """Attaches to torch only where somebody listens."""

    def __init__(
        self,
        when_imported: Callable[[str, Callable[[Any], None]], None],
        surrounds: Callable[[Any], Any],
    ) -> None:
        self._when_imported, self._surrounds = when_imported, surrounds
        self._before: list[Callable[[], None]] = []

    def before(self, act: Callable[[], None]) -> None:
        if not self._before:
            for module in ("torch.nn.utils.clip_grad", "torch.nn.utils"):
                self._when_imported(module, self._attach)
        self._before.append(act)

    def _attach(self, module: Any) -> None:
        for name in _NAMES:
            original = getattr(module, name, None)
            if original is not None and not hasattr(original, "_stepscope"):
                setattr(module, name, self._announced(original))

    def _announced(self, original: Any) -> Any:
        @self._surrounds
        @functools.wraps(original)
        def clip(*args: Any, **kwargs: Any) -> Any:
            for act in self._before:
                act()
            return original(*args, **kwargs)

        clip._stepscope = True
        return clip
