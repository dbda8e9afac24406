"""What a schedule costs, counted from its messages: the formula for every number of ranks.

A step ends when its busiest rank is done: with alpha, its bytes x beta and what it adds x gamma.
Ranks of one host share its link to other hosts.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stepscope.predict.alpha_beta import evaluate
from stepscope.predict.collective_formulas import CollectiveTerms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.records.collectives.schedule import CollectiveSchedule, Message
    from stepscope.records.laboratory import LinkModel
    from stepscope.records.profile import Segment


class StepLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One step. Bytes are shares of the vector."""

    sent: float  # by the busiest rank, or got by it
    inside: float  # the same for messages inside a host
    between: float  # leaving the busiest host, or coming to it
    added: float  # by the busiest rank
    messages: int  # of the busiest rank
    senders: int


def step_loads(schedule: CollectiveSchedule, hosts: Sequence[Sequence[int]]) -> list[StepLoad]:
    """One for each step; `hosts` lists the ranks of each."""
    host_of = {rank: place for place, host in enumerate(hosts) for rank in host}
    return [_load(step, schedule.chunks, host_of) for step in schedule.steps]


def count_terms(schedule: CollectiveSchedule) -> CollectiveTerms:
    """Steps, bytes sent and bytes added, as the textbook counts them."""
    loads = step_loads(schedule, [range(schedule.ranks)])
    return CollectiveTerms(
        steps=len(loads),
        sent=sum(load.sent for load in loads),
        added=sum(load.added for load in loads),
    )


def predict_ns(loads: Sequence[StepLoad], size_bytes: float, ranks: int, link: LinkModel) -> float:
    """How long a collective of so many bytes takes."""
    return link.start_ns + sum(_step_ns(load, size_bytes, ranks, link) for load in loads)


def _step_ns(load: StepLoad, size_bytes: float, ranks: int, link: LinkModel) -> float:
    if link.inside is None:
        travel = _between_lines(load, load.sent * size_bytes, ranks, link)
    else:
        parts = []
        if load.inside:
            parts.append(_at(link.inside, load.inside * size_bytes))
        if load.between:
            parts.append(_at(link.hop, load.between * size_bytes))
        travel = max(parts, default=0.0)
    further = (load.messages - 1) * link.message_ns
    return travel + further + load.added * size_bytes * link.gamma_ns_per_byte


def _between_lines(load: StepLoad, sent_bytes: float, ranks: int, link: LinkModel) -> float:
    """Between a pair on its own and everyone at once, by the number of ranks that send."""
    alone, together = _at(link.pair, sent_bytes), _at(link.hop, sent_bytes)
    busy = min(1.0, max(0, load.senders - 2) / (ranks - 2)) if ranks > 2 else 1.0
    return alone + (together - alone) * busy


def _at(line: Sequence[Segment], size_bytes: float) -> float:
    return float(evaluate(line, np.array([size_bytes]))[0])


def _load(step: tuple[Message, ...], chunks: int, host_of: dict[int, int]) -> StepLoad:
    ways: dict[str, Counter[tuple[str, int]]] = {"all": Counter(), "inside": Counter()}
    hosts: Counter[tuple[str, int]] = Counter()
    added: Counter[int] = Counter()
    messages: Counter[int] = Counter()
    for one in step:
        source, target, count = one.source, one.target, len(one.chunks)
        near = host_of[source] == host_of[target]
        for way in ("all", "inside") if near else ("all",):
            ways[way]["out", source] += count
            ways[way]["in", target] += count
        if not near:
            hosts["out", host_of[source]] += count
            hosts["in", host_of[target]] += count
        added[target] += count if one.adds else 0
        messages[source] += 1
    return StepLoad(
        sent=max(ways["all"].values()) / chunks,
        inside=max(ways["inside"].values(), default=0) / chunks,
        between=max(hosts.values(), default=0) / chunks,
        added=max(added.values()) / chunks,
        messages=max(messages.values()),
        senders=len(messages),
    )
