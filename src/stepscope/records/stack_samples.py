"""Sampled Python stacks of the training thread, and how they differ in steps that stall."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from stepscope.records.place import Place


class StackSamples(msgspec.Struct, frozen=True, kw_only=True):
    """One row per sample, in the order of time."""

    stacks: tuple[tuple[Place, ...], ...]  # each once, its outermost frame first
    number: NDArray[np.int64]  # of the step that ran
    stack: NDArray[np.int64]  # index into stacks
    environments: tuple[str, ...] = ()  # libraries of environments that the script has loaded


class StackShare(msgspec.Struct, frozen=True, kw_only=True):
    """One stack: its share of the samples in stalled steps, and of those in typical ones."""

    frames: tuple[Place, ...]  # the outermost first
    stalled: float
    typical: float


class StackDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Stacks in steps that stalled for one cause, against those in typical steps."""

    cause: str  # one of STALL_CAUSES
    stalled_steps: int
    typical_steps: int
    stalled_samples: int
    typical_samples: int
    stacks: tuple[StackShare, ...]  # those that differ most come first
    stalled_ms: float = 0.0  # the mean of the stalled steps
    typical_ms: float = 0.0


class LineDifference(msgspec.Struct, frozen=True, kw_only=True):
    """How much longer one line runs in a stalled step than in a typical one."""

    place: Place
    more_ms: float
    low_ms: float  # 95% interval, from the number of samples
    high_ms: float
