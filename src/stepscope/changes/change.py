"""Declare one thing that a user can change: what it is, and by whom it is predicted and applied.

The parts that do the work live in other rooms and are named here by dotted name. A part is imported
when it is first used: the training process loads what applies a change, never what predicts it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from enum import IntEnum, StrEnum, auto
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.records.explanation import Remedy


class Code(str):
    """A function or record of another room, as `predict.whatifs.precision:predict`."""

    __slots__ = ()

    def load(self) -> Any:
        module, _, name = self.partition(":")
        return getattr(import_module(f"stepscope.{module}"), name)


class Effect(StrEnum):
    """What a change does to the numbers, from nothing to everything."""

    BIT_IDENTICAL = "bit-identical"
    ROUNDING = "rounding"  # the same up to rounding
    RANDOM = "random"  # other random numbers are drawn
    TRAINING = "training"  # another training: it may converge otherwise

    @property
    def level(self) -> int:
        return list(Effect).index(self)


class ApplyStage(IntEnum):
    """Predicted changes are made in this order, whatever order they were asked for in.

    What-ifs read the trace as well as the graph. So removing and shortening come first, while the
    two still agree. Next comes another GPU, whose rates then price operators by their shapes, then
    what grows or repeats tasks, then the exchange between workers, which is planned as a whole. A
    CUDA graph comes last: it leaves one call and no phases.
    """

    REMOVE = auto()
    SCALE = auto()
    STOP_WAITING = auto()
    THREADS = auto()
    GPU = auto()
    PRECISION = auto()
    OPTIMIZER = auto()
    FUSE = auto()
    BATCH = auto()
    RECOMPUTE = auto()
    ACCUMULATE = auto()
    WORKERS = auto()
    SHARD = auto()
    BUCKETS = auto()
    LINKS = auto()
    BALANCE = auto()
    LAUNCH_ONCE = auto()


@dataclass(frozen=True, slots=True)
class WhatIf:
    """How `whatif` predicts a change: `part(context, value)` gives an Outcome (predict)."""

    part: Code | Callable[[Any, str], Any]
    _: KW_ONLY
    help: str  # one line for `stepscope whatif --list`
    label: str | Code | Callable[[str], str]  # what people call it; {} stands for the value
    stage: ApplyStage
    takes_value: bool = True
    value_is_optional: bool = False
    repeatable: bool = False  # may be given more than once
    usual: tuple[str, ...] = ()  # values worth trying on any step
    for_several_ranks: bool = False  # tried only on a job of several ranks
    needs_every_step: bool = False  # tried only if all steps of the run are known
    saves_memory: tuple[str, ...] = ()  # values that save memory and cost time
    is_goal: bool = False  # nobody can make this change as such; a finding says how to get there
    keeps_peak: bool = False  # peak memory stays as it is
    joins_peak: bool = False  # its peak counts the changes made before it
    shares_batch: Callable[[str], bool] | None = None  # if so, the peak joins others too
    needs_ceilings: bool = True  # priced by calibrated rates, not by the trace alone


@dataclass(frozen=True, slots=True)
class Application:
    """How `run --with` and `tune` apply a change: `part` is a Fix, which also patches (fix).

    `effect` is the worst that the change can do to the numbers. Some do less to most scripts:
    workers of a DataLoader draw other random numbers, but only if the dataset draws any. Such a
    change says so with `may_be`, the least it does. `tune` then tries it if `may_be` is allowed,
    even if `effect` is not, and decides by what the losses show. It is kept
    - if the losses show no more than what is allowed: they stayed bit-identical, say; or
    - if the effect is `random` and the baseline against itself differs just as much: a script
      without a fixed seed draws other random numbers in every run anyway.
    Otherwise it is shown as found and not kept, with the `--allow` that would keep it.
    """

    part: Code
    effect: Effect
    _: KW_ONLY
    may_be: Effect | None = None
    # What `tune` tries, one at a time: "" means that it takes none, () that the script decides.
    values: tuple[str, ...] = ("",)
    family: str = ""  # of a family only one is applied at a time
    # Tried again once one of these families is kept: prefetch-factor needs workers.
    after: frozenset[str] = frozenset()
    saves: str = "time"  # "memory": it costs time, so `tune` tries it only where memory is short
    patch_only: bool = False  # nothing of it can be injected: it is an edit of the script

    @property
    def takes_value(self) -> bool:
        return self.values != ("",)


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that a user can change. A part that does not exist is None.

    A finding offers it with `offer`. `predicted_as` are the settings of `whatif --set` that predict
    it where a finding offers it: the best one counts. `setting` is the one that its bare id stands
    for. `ways` are changes that can be applied to get there, where it is a goal or one of several
    ways.
    """

    id: str
    action: str = ""  # what to do, as a finding says it; none for what is only predicted
    _: KW_ONLY
    prediction: WhatIf | None = None
    application: Application | None = None
    predicted_as: tuple[str, ...] = ()
    setting: str = ""
    ways: tuple[str, ...] = ()

    def offer(self, summary: str = "") -> Remedy:
        """Return the change as a finding offers it; `summary` fits the action to the case."""
        from stepscope.records.explanation import Remedy  # the training process needs the ids alone

        return Remedy(id=self.id, summary=summary or self.action)

    def describe(self, value: str) -> str:
        """Return what people call the predicted change with this value."""
        assert self.prediction is not None
        label = self.prediction.label
        if isinstance(label, Code):
            label = label.load()
        if not isinstance(label, str):
            return label(value)
        return self.id if self.prediction.takes_value and not value else label.format(value)

    def why_not_predicted(self) -> str:
        """Say why `whatif` cannot answer for a change that no prediction stands for."""
        return (
            f"stepscope cannot predict the change {self.id!r}. `stepscope tune --only {self.id}` "
            "measures it if stepscope can apply it, and `stepscope ab` compares two versions"
        )

    def why_not_applied(self) -> str:
        """Say why a change without a part that applies it has to be made by hand."""
        return (
            f"stepscope cannot apply the change {self.id!r} for you: make it in the script, then "
            "compare both versions with `stepscope ab`"
        )
