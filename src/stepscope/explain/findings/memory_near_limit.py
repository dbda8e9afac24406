"""The device's memory is nearly full, or was full."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.explain.memory.words import between_words, biggest, held_words
from stepscope.records.explanation import Finding, Place, Remedy
from stepscope.records.figures import size
from stepscope.records.words import counted

if TYPE_CHECKING:
    from stepscope.explain.findings.evidence import Evidence
    from stepscope.records.memory import Memory, OutOfMemory

NEAR, FULL = 0.90, 0.97
_REMEDIES = (
    Remedy(id="activation-checkpointing", summary="recompute activations instead of keeping them"),
    Remedy(id="precision", summary="bf16 autocast halves most activations"),
    Remedy(id="smaller-batch", summary="a smaller batch, accumulated over several passes"),
    Remedy(id="sharding", summary="shard optimizer state, gradients and parameters (FSDP)"),
)


def find(evidence: Evidence) -> Finding | None:
    """Allocated at the peak against the device's memory or the limit that was given."""
    return find_in(evidence.memory) if evidence.memory is not None else None


def find_in(memory: Memory) -> Finding | None:
    """The same of an account of memory alone."""
    if memory.out_of_memory:
        return _failed(memory, memory.out_of_memory[-1])
    if not memory.limit_bytes:
        return None
    share = memory.peak_bytes / memory.limit_bytes
    if share < NEAR:
        return None
    evidence = [
        f"{size(memory.peak_bytes)} allocated at the peak of {size(memory.limit_bytes)}",
        *held_words(memory),
    ]
    fit = memory.largest_batch
    if fit is not None and fit.largest is not None and fit.batch is not None:
        evidence.append(
            f"the largest batch that fits is about {fit.largest}"
            f"{between_words(fit.low, fit.high)}; now it is {fit.batch}"
        )
    return Finding(
        id="memory-near-limit",
        title="Memory nearly full",
        share=min(1.0, share),  # a limit that was given may be less than a step needs
        of="memory",
        severity="medium" if share >= FULL else "low",
        summary=f"a step needs {share:.0%} of the memory there is; most of it is "
        f"{biggest(memory)}.",
        evidence=tuple(evidence),
        remedies=_REMEDIES,
    )


def _failed(memory: Memory, last: OutOfMemory) -> Finding:
    limit = memory.limit_bytes or last.reserved_bytes
    many = len(memory.out_of_memory)
    where: tuple[Place, ...] = ()
    if last.file:
        where = (Place(file=last.file, line=last.line or 0, function=last.function),)
    return Finding(
        id="memory-near-limit",
        title="Out of memory",
        share=min(1.0, max(0.0, last.allocated_bytes / limit)) if limit else 1.0,
        of="memory",
        severity="high",
        summary=f"a request for {size(last.asked_bytes)} could not be met with "
        f"{size(last.allocated_bytes)} allocated.",
        evidence=(
            *_room(last),
            f"{counted(many, 'request')} failed in the recorded history",
            *held_words(memory),
        ),
        where=where,
        remedies=_REMEDIES,
    )


def _room(failed: OutOfMemory) -> list[str]:
    """What was reserved and what the device had, as far as that is known."""
    words = []
    if failed.reserved_bytes is not None:
        free = failed.reserved_bytes - failed.allocated_bytes
        words.append(
            f"reserved {size(failed.reserved_bytes)}, of which {size(free)} held no tensor"
        )
    if failed.device_free_bytes is not None:
        words.append(f"the device had {size(failed.device_free_bytes)} free")
    return ["; ".join(words)] if words else []
