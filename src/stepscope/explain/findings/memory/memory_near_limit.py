"""The device's memory is nearly full, or was full."""

from __future__ import annotations

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import from_memory
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.explain.memory.theory import between_words, biggest, held_words
from stepscope.records.explanation import Place
from stepscope.records.memory import Memory, OutOfMemory
from stepscope.text.figures import percent, size
from stepscope.text.words import counted

NEAR, FULL = 0.90, 0.97
_REMEDIES = (
    remedies.SAVE_MEMORY.offer(),
    remedies.ACTIVATION_CHECKPOINTING.offer(),
    remedies.BF16.offer("Use bf16 autocast: it halves most activations"),
    remedies.SMALLER_BATCH.offer(),
    remedies.SHARDING.offer(),
)


def find_in(memory: Memory) -> Finding | None:
    """Memory allocated at the peak, against the device's memory or the given limit."""
    if memory.out_of_memory:
        return _report_failure(memory, memory.out_of_memory[-1])
    if not memory.limit_bytes:
        return None
    share = memory.peak_bytes / memory.limit_bytes
    if share < NEAR:
        return None
    evidence = [
        f"{size(memory.peak_bytes)} of {size(memory.limit_bytes)} allocated at the peak",
        *held_words(memory),
    ]
    fit = memory.largest_batch
    if fit is not None and fit.largest is not None and fit.batch is not None:
        evidence.append(
            f"the largest batch that fits is about {fit.largest}"
            f"{between_words(fit.low, fit.high)}; the current batch is {fit.batch}"
        )
    return RULE.finding(
        share=min(1.0, share),  # a given limit may be less than the step needs
        of="memory",
        severity="medium" if share >= FULL else "low",
        summary=f"A step needs {percent(share)} of the available memory. Most of it is "
        f"{biggest(memory)}.",
        evidence=tuple(evidence),
        remedies=_REMEDIES,
    )


def _report_failure(memory: Memory, last: OutOfMemory) -> Finding:
    limit = memory.limit_bytes or last.reserved_bytes
    many = len(memory.out_of_memory)
    where: tuple[Place, ...] = ()
    if last.file:
        where = (Place(file=last.file, line=last.line or 0, function=last.function),)
    return RULE.finding(
        title="Out of memory",
        share=min(1.0, max(0.0, last.allocated_bytes / limit)) if limit else 1.0,
        of="memory",
        severity="high",
        summary=f"A request for {size(last.asked_bytes)} failed with "
        f"{size(last.allocated_bytes)} allocated.",
        evidence=(
            *_describe_room(last),
            f"{counted(many, 'request')} failed in the recorded history",
            *held_words(memory),
        ),
        where=where,
        remedies=_REMEDIES,
    )


def _describe_room(failed: OutOfMemory) -> list[str]:
    """What torch had reserved and what the device had free, where known."""
    words = []
    if failed.reserved_bytes is not None:
        free = failed.reserved_bytes - failed.allocated_bytes
        words.append(
            f"{size(failed.reserved_bytes)} reserved, of which {size(free)} held no tensor"
        )
    if failed.device_free_bytes is not None:
        words.append(f"the device had {size(failed.device_free_bytes)} free")
    return ["; ".join(words)] if words else []


RULE = FindingRule(id="memory-near-limit", title="Memory nearly full", find=from_memory(find_in))
