"""An explanation in a few figures, for what shows many runs or a run that goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stepscope.records.live_run import FindingNow, VerdictNow
from stepscope.ui.words import one_line

if TYPE_CHECKING:
    from stepscope.records.explanation import Explanation
    from stepscope.records.memory import LargestBatch

_MOST_FINDINGS = 4
_MOST_TEXT = 600


class _Efficiency(msgspec.Struct, frozen=True):
    mfu: float | None = None


class _Batch(msgspec.Struct, frozen=True):
    batch: int | None = None
    batches_per_step: int | None = 1


class _Memory(msgspec.Struct, frozen=True):
    peak_bytes: int | None = None
    largest_batch: _Batch | None = None


class _Rank(msgspec.Struct, frozen=True):
    efficiency: _Efficiency | None = None
    memory: _Memory | None = None


class ExplainedJson(msgspec.Struct, frozen=True):
    """What is needed of `explain --json`; names as in Explanation."""

    verdict: str = ""
    ranks: list[_Rank] = []
    findings: list[FindingNow] = []


def brief_verdict(explained: Explanation | ExplainedJson) -> VerdictNow:
    """The least MFU, the largest peak and the first findings of all ranks."""
    mfus = [rank.efficiency.mfu for rank in explained.ranks if rank.efficiency]
    memories = [rank.memory for rank in explained.ranks if rank.memory]
    batches = [memory.largest_batch for memory in memories if memory.largest_batch]
    peaks = [memory.peak_bytes for memory in memories if memory.peak_bytes is not None]
    return VerdictNow(
        verdict=_short(explained.verdict),
        findings=tuple(
            FindingNow(id=one.id, summary=_short(one.summary), severity=one.severity)
            for one in explained.findings[:_MOST_FINDINGS]
        ),
        mfu=min((mfu for mfu in mfus if mfu is not None), default=None),
        peak_bytes=max(peaks, default=None),
        batch=next(filter(None, map(_samples, batches)), None),
    )


def _samples(batch: LargestBatch | _Batch) -> int | None:
    """Of one rank's step."""
    if batch.batch is None or batch.batches_per_step is None:
        return None
    return batch.batch * batch.batches_per_step


def _short(text: str) -> str:
    return one_line(text)[:_MOST_TEXT]
