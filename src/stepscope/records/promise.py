"""Predictions that `whatif` promised, and what was measured: the lines of the track record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from stepscope.records.limits import Ms, Ranks, Share, SomeMs, UnixS  # noqa: TC001
from stepscope.records.prediction import Setting, StepBasis  # noqa: TC001  (decoded at run time)

if TYPE_CHECKING:
    from collections.abc import Iterable

RECORD_SCHEMA = 1
_Change = Annotated[float, msgspec.Meta(ge=-1)]  # b over a, less one


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What identifies a training step; None for what was not captured."""

    script: str | None = None  # the file's name, without its folder
    world_size: Ranks | None = None
    device: str | None = None
    signature: str | None = None  # of the operators and their shapes

    def differs_in(self, other: Workload) -> tuple[str, ...]:
        """What is known of both and differs."""
        return tuple(
            name
            for name in ("script", "world_size", "device", "signature")
            if None not in (ours := getattr(self, name), theirs := getattr(other, name))
            and ours != theirs
        )

    def is_same(self, other: Workload) -> bool:
        """The same operators with the same shapes, and nothing known of both differs."""
        known = self.signature is not None and other.signature is not None
        return known and not self.differs_in(other)


class Promise(msgspec.Struct, frozen=True, kw_only=True, tag="promise", tag_field="kind"):
    """One prediction, written down before anybody tried the change."""

    id: str
    when_unix: UnixS
    host: str
    settings: tuple[Setting, ...]
    baseline_ms: SomeMs
    predicted_ms: SomeMs
    low_ms: Ms
    high_ms: Ms
    workload: Workload = Workload()
    path: str | None = None  # of the baseline's run or trace
    basis: StepBasis = "median"  # older promises are about medians
    schema: int = RECORD_SCHEMA

    @property
    def name(self) -> str:
        """The what-ifs without their values: predictions of one name share a history."""
        return promise_name(setting.name for setting in self.settings)

    @property
    def words(self) -> str:
        """As the user wrote it."""
        return " ".join(str(setting) for setting in self.settings)


class Delivery(msgspec.Struct, frozen=True, kw_only=True, tag="delivery", tag_field="kind"):
    """What a comparison measured for a promise."""

    promise: str
    when_unix: UnixS
    a_ms: SomeMs
    b_ms: SomeMs
    change: _Change
    low: _Change
    high: _Change
    confidence: Share
    verdict: str
    named: bool = False  # the user said which promise it was
    seen: tuple[str, ...] = ()  # traits of the promised change, in what was captured of A and B
    a_path: str | None = None
    b_path: str | None = None
    basis: StepBasis = "median"  # that of its promise
    schema: int = RECORD_SCHEMA


class Forgotten(msgspec.Struct, frozen=True, kw_only=True, tag="forgotten", tag_field="kind"):
    """A promise, or only its deliveries so far, that no longer counts."""

    promise: str
    when_unix: UnixS
    delivery_only: bool = False
    schema: int = RECORD_SCHEMA


class TrackedPromise(msgspec.Struct, frozen=True, kw_only=True):
    """A promise and, once the change was tried, its newest delivery."""

    promise: Promise
    delivery: Delivery | None = None

    @property
    def delivered_ms(self) -> float | None:
        """The promise's baseline, changed as the measured step changed."""
        if self.delivery is None:
            return None
        return self.promise.baseline_ms * self.delivery.b_ms / self.delivery.a_ms

    @property
    def error(self) -> float | None:
        """Delivered over predicted, minus one: above zero, the step is longer than promised."""
        delivered = self.delivered_ms
        return None if delivered is None else delivered / self.promise.predicted_ms - 1

    @property
    def inside(self) -> bool | None:
        """Whether the delivered step lies in the promised interval."""
        delivered = self.delivered_ms
        if delivered is None:
            return None
        return self.promise.low_ms <= delivered <= self.promise.high_ms


def promise_name(names: Iterable[str]) -> str:
    """One name for several what-ifs, whatever their order."""
    return "+".join(sorted(names))
