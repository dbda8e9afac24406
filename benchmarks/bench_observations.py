"""What was observed of training in 2018 to 2021, held against what was measured now.

The observations are those of the TBD suite and of the papers around it (Echo on recurrent nets,
HFTA on small ones). Each check says where it holds and where it does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from stepscope.bench.catalogue import load
from stepscope.text.figures import percent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from stepscope.bench.results import WorkloadResult

    Rows = dict[str, dict[str, WorkloadResult]]  # by workload and way
    Promises = dict[str, dict[str, Any]]

PLAIN = "fp32"
SATURATED = 1.15  # times the samples per second, with twice the batch: less is saturation
UNDERUSED = 0.5  # of the step in which the device works


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One workload, or one comparison of several."""

    name: str
    holds: bool
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    says: str
    source: str
    cases: Callable[[Rows, Promises], Iterable[Case]]


def _largest_is_activations(tag: str) -> Callable[[Rows, Promises], Iterator[Case]]:
    def cases(rows: Rows, _: Promises) -> Iterator[Case]:
        for name, row in _tagged(rows, tag):
            activations, total = row.memory.get("activations"), sum(row.memory.values())
            if activations is not None and total:
                share = activations / total
                yield Case(name=name, holds=share > 0.5, because=f"{percent(share)} of the peak")

    return cases


def _activations_exceed_weights(rows: Rows, _: Promises) -> Iterator[Case]:
    for name, row in _tagged(rows, "attention", without="recurrent"):
        activations, weights = row.memory.get("activations"), row.memory.get("parameters")
        if activations is not None and weights:
            times = activations / weights
            yield Case(name=name, holds=times > 1, because=f"{times:.1f} times the weights")


def _recurrent_below_convolutional(field: str) -> Callable[[Rows, Promises], Iterator[Case]]:
    """Each recurrent net against the median of the convolutional ones."""

    def cases(rows: Rows, _: Promises) -> Iterator[Case]:
        convolutional = [getattr(row, field) for _, row in _tagged(rows, "convolutional")]
        known = [value for value in convolutional if value is not None]
        if not known:
            return
        middle = median(known)
        for name, row in _tagged(rows, "recurrent"):
            value = getattr(row, field)
            if value is not None:
                because = f"{percent(value)} against {percent(middle)}, the convolutional median"
                yield Case(name=name, holds=value < middle, because=because)

    return cases


def _recurrent_saturates(rows: Rows, promises: Promises) -> Iterator[Case]:
    for name, _ in _tagged(rows, "recurrent"):
        result = promises.get(name, {})
        twice_ms = result.get("changes", {}).get("batch x2", {}).get("ms")
        if twice_ms and result.get("base"):
            gain = 2 * result["base"]["ms"] / twice_ms
            because = f"twice the batch gives {gain:.2f} times the samples per second"
            yield Case(name=name, holds=gain < SATURATED, because=because)


def _small_nets_leave_it_idle(rows: Rows, _: Promises) -> Iterator[Case]:
    for name, row in _plain(rows):
        if name.startswith(("pointnet", "dcgan")) and row.busy is not None:
            because = f"the device works for {percent(row.busy)} of the step"
            yield Case(name=name, holds=row.busy < UNDERUSED, because=because)


OBSERVATIONS = (
    Observation(
        says="Feature maps dominate memory in convolutional nets (more than half of the peak).",
        source="vDNN, 2016; Gist, 2018; TBD",
        cases=_largest_is_activations("convolutional"),
    ),
    Observation(
        says="Feature maps dominate memory in recurrent nets.",
        source="Echo, 2020; TBD",
        cases=_largest_is_activations("recurrent"),
    ),
    Observation(
        says="Feature maps still need more memory than weights in BERT and its kind.",
        source="TBD's update of 2020",
        cases=_activations_exceed_weights,
    ),
    Observation(
        says="Recurrent nets keep the device less busy than convolutional ones.",
        source="TBD; Echo, 2020",
        cases=_recurrent_below_convolutional("busy"),
    ),
    Observation(
        says="Recurrent nets reach a smaller share of the compute peak than convolutional ones.",
        source="TBD; Echo, 2020",
        cases=_recurrent_below_convolutional("mfu"),
    ),
    Observation(
        says="Throughput of recurrent nets saturates as the batch grows.",
        source="Echo, 2020",
        cases=_recurrent_saturates,
    ),
    Observation(
        says="Small nets of research leave most of a large GPU unused.",
        source="HFTA, 2021",
        cases=_small_nets_leave_it_idle,
    ),
)


def _plain(rows: Rows) -> Iterator[tuple[str, WorkloadResult]]:
    """In fp32, as they were then, and measured."""
    for name, ways in rows.items():
        if PLAIN in ways and ways[PLAIN].status == "measured":
            yield name, ways[PLAIN]


def _tagged(rows: Rows, tag: str, without: str = "") -> Iterator[tuple[str, WorkloadResult]]:
    for name, row in _plain(rows):
        tags = load(name).tags
        if tag in tags and without not in tags:
            yield name, row


def print_observations(rows: Rows, promises: Promises) -> None:
    """Markdown."""
    print("\n## What was observed then, and what holds now\n")
    for observation in OBSERVATIONS:
        cases = list(observation.cases(rows, promises))
        print(f"- **{observation.says}** ({observation.source}) {verdict(cases)}")
        for case in cases:
            print(f"  - {case.name}: {'holds' if case.holds else 'does not hold'}: {case.because}")


def verdict(cases: list[Case]) -> str:
    if not cases:
        return "Not checked: nothing was measured that would show it."
    holding = sum(case.holds for case in cases)
    if holding == len(cases):
        return f"Holds in all {len(cases)}."
    if not holding:
        return f"No longer holds in any of {len(cases)}."
    return f"Holds in {holding} of {len(cases)}."
