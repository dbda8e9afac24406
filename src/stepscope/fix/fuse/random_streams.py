"""A stream of random numbers for each model, as it would have alone; new tensors drawn from
it, and no draws on the host.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from stepscope.errors import UsageError
from stepscope.fix.fuse.ledger import innermost, note
from stepscope.fix.fuse.stacked import NotFusableError, Stacked, all_common
from stepscope.fix.random_states import restore, states_now

Draws = Literal["own", "together"]
_current: list[Streams] = []


class Streams:
    """States of torch's generators by model. `seeds` begin them; None: where torch's own is.

    `together`: torch's own generator draws for all models at once; each has other numbers than it
    would have alone, but one kernel draws them, which a CUDA graph or a compiler can hold.
    """

    def __init__(self, seeds: Sequence[int | None], together: bool = False) -> None:
        self.together = together
        self._repeats = False
        self.states: list[list[Any]] = [_started(seed) for seed in seeds]

    @contextmanager
    def of(self, model: int) -> Iterator[None]:
        """Meanwhile torch draws from this model's stream."""
        if self.together:
            yield
            return
        if self._repeats:
            raise UsageError(
                "a checkpointed part of the model draws random numbers, which must be the "
                'same when it is recomputed. Write fuse(..., draws="together")'
            )
        outer = states_now()
        restore(self.states[model])
        try:
            yield
        finally:
            self.states[model] = states_now()
            restore(outer)

    def outside(self) -> torch.Tensor | None:
        """The state of the generator that no model draws from."""
        return None if self.together else torch.get_rng_state()

    def check_outside(self, before: torch.Tensor | None) -> None:
        """UsageError if something was drawn once for all models."""
        if before is not None and not torch.equal(before, torch.get_rng_state()):
            raise UsageError(
                "the models' code drew random numbers with a function that draws once for "
                "all models. Draw with torch.rand, torch.randn or dropout, or outside of the "
                "fused models"
            )

    @contextmanager
    def only(self) -> Iterator[None]:
        """NotFusableError if something is drawn meanwhile from no model's stream."""
        before = None if self._repeats else self.outside()
        yield
        if before is not None and not torch.equal(before, torch.get_rng_state()):
            torch.set_rng_state(before)
            raise NotFusableError("it draws random numbers in a way that only a single model can")

    @property
    def are_used(self) -> bool:
        return bool(_current) and _current[-1] is self

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Meanwhile something is computed a second time; only torch's own stream can do that."""
        self._repeats = True
        try:
            yield
        finally:
            self._repeats = False

    def used(self) -> AbstractContextManager[None]:
        return innermost(_current, self)


def draws_together(draws: Draws) -> bool:
    if draws not in ("own", "together"):
        raise UsageError(f'draws is "own" or "together", not {draws!r}')
    return draws == "together"


def streams() -> Streams:
    """Those of the array that computes now."""
    return _current[-1]


def drawing_as(model: int) -> AbstractContextManager[None]:
    """This model's stream, where an array computes; elsewhere torch's own."""
    return _current[-1].of(model) if _current else nullcontext()


def _started(seed: int | None) -> list[Any]:
    if seed is None:
        return states_now()
    outer = states_now()
    torch.manual_seed(seed)
    begun = states_now()
    restore(outer)
    return begun


# Tensors that a model's code makes of nothing.
#
# Of random ones, such as torch.rand(3), each model has its own. Others, such as torch.zeros(3), are
# one for all until the code writes into them.

_DRAWING = {torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal}
_EQUAL = {torch.zeros, torch.ones, torch.empty, torch.full}
_paused: list[bool] = []


class OwnDraws(TorchFunctionMode):
    """Meanwhile `count` models compute: what is made of nothing is made for each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _EQUAL and not _paused:
            new = func(*args, **kwargs)
            return new if isinstance(new, Stacked) else Stacked.share(new, self._count)
        if func not in _DRAWING or _paused or not all_common(args, kwargs):
            return func(*args, **kwargs)
        note(func.__name__, "one by one")
        drawn = []
        for model in range(self._count):
            with streams().of(model), as_drawn_alone():
                drawn.append(func(*args, **kwargs))
        return Stacked(torch.stack(drawn), self._count)


def as_drawn_alone() -> AbstractContextManager[None]:
    """Meanwhile one model computes, and draws for itself."""
    return innermost(_paused, True)


# Random numbers of Python and numpy: drawn in forward, they would be one model's for all.


def host_random_state() -> tuple[Any, bytes, int]:
    """Changes with every number drawn."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), b"", 0
    state = numpy.random.get_state(legacy=False)["state"]
    return random.getstate(), state["key"].tobytes(), state["pos"]


def check_nothing_drawn(before: tuple[Any, bytes, int]) -> None:
    after = host_random_state()
    if after != before:
        name = "random" if after[0] != before[0] else "numpy.random"
        raise UsageError(
            f"the models' code draws from Python's {name}, which happens once for all models. "
            "Draw with torch (torch.rand(()).item()), so that each model draws for itself, "
            "or draw outside of the fused models"
        )
