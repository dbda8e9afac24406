"""Asks what a plan's steps took, and has the plan made again where that is too long."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

from stepscope.fix.saved.encodings.copy_waits import COPY_WAITS
from stepscope.fix.saved.encodings.offload import link_of
from stepscope.fix.saved.following_costs import with_host_costs
from stepscope.fix.saved.offload_offers import with_offload
from stepscope.fix.saved.step_record import USUALLY_DEARER
from stepscope.fix.saved.time_limit import CHECKED_AFTER, added_time, latest_added_time

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch

    from stepscope.fix.saved.known_pass import KnownPass
    from stepscope.fix.saved.step_record import StepRecord
    from stepscope.fix.saved.step_watch import StepWatch
    from stepscope.records.memory_targets import MemoryTarget


def check_steps(known: KnownPass, watch: StepWatch, target: MemoryTarget) -> str | None:
    """Says what was done; `known` may have another plan afterwards."""
    return _look_again(known, watch, target) if known.decided else _try(known, watch, target)


def _try(known: KnownPass, watch: StepWatch, target: MemoryTarget) -> str | None:
    added = added_time(watch, known.key)
    if added is not None:
        waited_ns = COPY_WAITS.waited_ns() // max(1, known.followed_passes - 1)
        added = replace(added, waited_ns=waited_ns)
    said = known.check_time(added, target)
    if known.decided:
        COPY_WAITS.end()
    return said


def _look_again(known: KnownPass, watch: StepWatch, target: MemoryTarget) -> str | None:
    """Waits for copies are noted from the first slow look to the second."""
    if known.added is None or known.looks is None or known.record is None:
        return None
    added = latest_added_time(watch, known.key, known.added.plain_ns)
    if added is not None and known.looks.suspects:
        added = replace(added, waited_ns=COPY_WAITS.waited_ns() // CHECKED_AFTER)
    has_room = functools.partial(watch.has_room, known.record.surroundings)
    said = known.check_later(added, target, has_room)
    if known.looks is not None and known.looks.suspects:
        COPY_WAITS.begin()
    else:
        COPY_WAITS.end()
    return said


def completed(
    record: StepRecord,
    key: Hashable,
    watch: StepWatch,
    target: MemoryTarget,
    parameters: list[torch.Tensor],
) -> StepRecord:
    """With what stood around the pass, and what the host or the link to it costs."""
    timed = target.max_slowdown is not None
    record = replace(
        with_host_costs(record) if record.on_host or timed else record,
        surroundings=watch.surroundings(parameters),
        measured_step_ns=watch.plain_ns(key),
        host_slack_ns=None if record.on_host else watch.host_slack_ns(key),
        dearer=record.dearer if record.on_host else USUALLY_DEARER,
    )
    link = link_of(watch.device)
    return record if link is None else with_offload(record, link.speed())
