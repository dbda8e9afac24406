"""The targets, and whether a measurement meets them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A lower or upper limit on one number."""

    name: str
    at_least: float | None = None
    at_most: float | None = None
    unit: str = ""

    def met(self, value: float) -> bool:
        enough = self.at_least is None or value >= self.at_least
        return enough and (self.at_most is None or value <= self.at_most)

    @property
    def limit(self) -> str:
        if self.at_least is not None:
            return f">= {self.at_least:g}{self.unit}"
        return f"<= {self.at_most:g}{self.unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A target and what was measured."""

    target: Target
    value: float

    @property
    def met(self) -> bool:
        return self.target.met(self.value)

    def row(self) -> str:
        """One line of a table: name, value, limit, verdict."""
        value = f"{self.value:.3g}{self.target.unit}"
        verdict = "met" if self.met else "MISSED"
        return f"  {self.target.name:<46} {value:>10}   {self.target.limit:<12} {verdict}"


WHOLE = Target(name="whole process, times faster", at_least=6, unit="x")
IN_PROCESS = Target(name="load + explain, times faster", at_least=8, unit="x")
PEAK = Target(name="peak memory, ours / peer", at_most=0.7)
CACHED = Target(name="second open from the cache, times faster", at_least=5, unit="x")
BIG_PEAK = Target(name="1 GB trace: peak memory", at_most=1.2, unit=" GB")
MANY_WALL = Target(name="1024 ranks: wall time", at_most=10, unit=" min")
MANY_WORKER = Target(name="1024 ranks: peak memory of a worker", at_most=2, unit=" GB")
MANY_PARENT = Target(name="1024 ranks: peak memory of the parent", at_most=2, unit=" GB")
RANKS_WALL = Target(name="10,000 ranks: explain, wall time", at_most=5, unit=" min")
RANKS_TREE = Target(name="10,000 ranks: peak memory, all processes", at_most=1.5, unit=" GB")
LONG_WALL = Target(name="long run: explain, wall time", at_most=10, unit=" s")
LONG_PEAK = Target(name="long run: explain, peak memory", at_most=500, unit=" MB")
LONG_DISK = Target(name="long run: disk of a rank", at_most=100, unit=" MB")
HELP_CPU = Target(name="stepscope --help, CPU time", at_most=0.25, unit=" s")


def geometric_mean(values: Iterable[float]) -> float:
    """NaN, which meets no target, if there is nothing to average."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan
