"""Communication that no strategy explains: listed, so that every call appears somewhere."""

from __future__ import annotations

import numpy as np

from stepscope.explain.strategies.evidence import Bools, StrategyEvidence, names_at
from stepscope.records.job import KINDS
from stepscope.records.strategies import RankOtherCommunication, Use
from stepscope.step.work import COMM_SPAN

_QUIET = ("ProfilerStep", "autograd::engine::")


def find(evidence: StrategyEvidence, free: Bools) -> tuple[RankOtherCommunication | None, Bools]:
    if not free.any():
        return None, free
    calls = np.flatnonzero(free)
    # Name of the innermost event around each call that is not communication, or -1.
    around = evidence.inside(
        lambda name: not COMM_SPAN.search(name) and not name.startswith(_QUIET)
    )
    callers = names_at(evidence.trace.host, around)[calls]
    keys = np.stack((evidence.kind[calls], evidence.group[calls], callers), axis=1)
    distinct, inverse = np.unique(keys, axis=0, return_inverse=True)
    uses = []
    for place, (kind, group, caller) in enumerate(distinct.tolist()):
        at = calls[inverse.reshape(-1) == place]
        uses.append(
            Use(
                operation=KINDS[kind],
                group=evidence.groups[group],
                caller=evidence.trace.strings[caller] if caller >= 0 else "",
                count=len(at) / evidence.steps,
                **evidence.times_per_step(at),
            )
        )
    return RankOtherCommunication(
        step_ns=evidence.step_ns,
        comm_ns=evidence.comm_ns(free),
        exposed_ns=evidence.exposed_comm_ns(free),
        uses=tuple(sorted(uses, key=lambda use: -use.time_ns)),
    ), free
