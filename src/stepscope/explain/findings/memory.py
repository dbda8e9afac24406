"""Findings about the device's memory."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope import changes as remedies
from stepscope.explain.efficiency import above_peak
from stepscope.explain.findings.evidence import (
    LOW,
    MEDIUM,
    RankEvidence,
    cost_lines,
    costly_stall,
    rule,
    severity_of,
    spot_words,
    stalling_steps,
    typical_wait,
)
from stepscope.explain.memory.model import between_words, biggest, held_words
from stepscope.records.explanation import Finding, Place, Remedy, Severity
from stepscope.records.memory import Fragmentation, Memory, OutOfMemory
from stepscope.records.run import MemoryGrowth, RankRun
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


@rule("Memory nearly full", part="memory")
def memory_near_limit(memory: Memory) -> Finding | None:
    """The device's memory is nearly full, or was full. Memory allocated at the peak, against
    the device's memory or the given limit."""
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
    return memory_near_limit.finding(
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
    # What torch had reserved and what the device had free, where known.
    words = []
    if last.reserved_bytes is not None:
        free = last.reserved_bytes - last.allocated_bytes
        words.append(f"{size(last.reserved_bytes)} reserved, of which {size(free)} held no tensor")
    if last.device_free_bytes is not None:
        words.append(f"the device had {size(last.device_free_bytes)} free")
    return memory_near_limit.finding(
        title="Out of memory",
        share=min(1.0, max(0.0, last.allocated_bytes / limit)) if limit else 1.0,
        of="memory",
        severity="high",
        summary=f"A request for {size(last.asked_bytes)} failed with "
        f"{size(last.allocated_bytes)} allocated.",
        evidence=(
            *(["; ".join(words)] if words else []),
            f"{counted(many, 'request')} failed in the recorded history",
            *held_words(memory),
        ),
        where=where,
        remedies=_REMEDIES,
    )


SHARE = 0.25
LEAST_BYTES = 256_000_000
CROWDED = 0.80  # of the limit is reserved: the unused part is then missed


@rule("Reserved but unused memory", part="memory")
def fragmentation(memory: Memory) -> Finding | None:
    """Memory that torch has reserved from the device and that holds no tensor. 1 - allocated
    / reserved at the peak, where that is a lot."""
    missed = _missed(memory)
    state = missed or memory.fragmentation
    if state is None:
        return None
    free = state.reserved_bytes - state.allocated_bytes
    if missed is None and (state.share < SHARE or free < LEAST_BYTES):
        return None
    limit = memory.limit_bytes
    crowded = bool(limit and state.reserved_bytes >= CROWDED * limit)
    return fragmentation.finding(
        title="Fragmented memory" if missed else "",
        share=state.share,
        of="memory",
        severity="high" if missed else "medium" if crowded else "low",
        summary=f"{percent(state.share)} of the memory that torch reserved ({size(free)}) holds no "
        "tensor " + ("when a smaller request fails." if missed else f"at the {state.at}."),
        evidence=tuple(_list_evidence(memory, state, crowded=crowded, missed=missed is not None)),
        remedies=(remedies.EXPANDABLE_SEGMENTS.offer(), remedies.STEADY_SHAPES.offer()),
    )


def _missed(memory: Memory) -> Fragmentation | None:
    """The state in which a request failed although more was reserved and free.

    The allocator returns whole free segments before it fails: what is left is in pieces.
    """
    for failed in reversed(memory.out_of_memory):
        reserved, allocated = failed.reserved_bytes, failed.allocated_bytes
        if reserved is not None and 0 < failed.asked_bytes <= reserved - allocated:
            return Fragmentation(
                at="end",
                allocated_bytes=allocated,
                reserved_bytes=reserved,
                share=1 - allocated / reserved,
            )
    return None


def _list_evidence(
    memory: Memory, state: Fragmentation, *, crowded: bool, missed: bool
) -> Iterator[str]:
    allocated, reserved = size(state.allocated_bytes), size(state.reserved_bytes)
    yield f"{allocated} allocated of {reserved} reserved at the {state.at}"
    last = memory.at_end or state
    if last.largest_free_bytes is not None:
        yield (
            f"the largest of {counted(last.free_blocks or 0, 'free block')} is "
            f"{size(last.largest_free_bytes)} at the {last.at}"
        )
    if missed:
        yield "a request failed although torch had more than that reserved and free"
    elif memory.limit_bytes and not crowded:
        yield (
            f"{percent(state.reserved_bytes / memory.limit_bytes)} of the available memory is "
            "reserved: there is still room"
        )


SOON_STEPS = 1000


@rule("Memory grows over the run")
def memory_growth(evidence: RankEvidence) -> Finding | None:
    """Memory at step ends grows over the whole run. The limit is known where memory was
    captured."""
    limit = evidence.memory.limit_bytes if evidence.memory else None
    return find_growth(evidence.run, limit) if evidence.run else None


def find_growth(run: RankRun, limit_bytes: int | None = None) -> Finding | None:
    """`limit_bytes` is what the device has."""
    growth = run.memory_growth
    if growth is None:
        return None
    left = _steps_left(growth, limit_bytes)
    share = max(0.0, 1 - growth.first_bytes / max(1, growth.last_bytes))
    whose = "The process's memory" if growth.of == "host" else "Allocated memory"
    lines = [
        f"at the end of a step: {size(growth.first_bytes)} after the warm-up, "
        f"{size(growth.last_bytes)} at the end of the run ({percent(share)} of it is growth)",
        f"{_interval(growth)} per step, by the lowest level from each step to the end",
    ]
    if left is not None:
        lines.append(f"at this rate memory is full in about {counted(left, 'step')}")
    return memory_growth.finding(
        share=share,
        of="memory",
        severity=_growth_severity(share, left, run.steps),
        summary=f"{whose} grows by {size(growth.bytes_per_step)} per step over the whole run.",
        evidence=tuple(lines),
        remedies=_offer(growth),
    )


def _steps_left(growth: MemoryGrowth, limit_bytes: int | None) -> int | None:
    if growth.of == "host" or not limit_bytes:
        return None
    return int(max(0, limit_bytes - growth.last_bytes) // max(1.0, growth.bytes_per_step))


def _growth_severity(share: float, left: int | None, steps: int) -> Severity:
    """High if memory is full before as many steps again."""
    if left is not None and left < max(SOON_STEPS, steps):
        return "high"
    return "medium" if share >= MEDIUM else "low"


def _interval(growth: MemoryGrowth) -> str:
    low, high = size(growth.low), size(growth.high)
    return low if low == high else f"{low} to {high}"


def _offer(growth: MemoryGrowth) -> tuple[Remedy, ...]:
    detach = remedies.DETACH.offer()
    if growth.of == "host":
        return (detach, remedies.TRACEMALLOC.offer())
    return (detach, remedies.SNAPSHOT.offer())


# Share of the limit (or of the peak without a limit) that a thousand steps add.
LEAST_SHARE = 0.01


@rule("Memory grows")
def memory_leak(evidence: RankEvidence) -> Finding | None:
    """Memory that grows in every step. The window's steps. Where the whole run shows growth,
    memory-growth says it."""
    if evidence.memory is None or (evidence.run and evidence.run.memory_growth):
        return None
    return find_leak(evidence.memory)


def find_leak(memory: Memory) -> Finding | None:
    """Steady growth of the memory that is alive between steps."""
    growth = memory.growth
    if growth is None or not growth.steady:
        return None
    whole = memory.limit_bytes or memory.peak_bytes
    if SOON_STEPS * growth.bytes_per_step < LEAST_SHARE * whole:
        return None
    ends = growth.ends_bytes
    evidence = [
        f"alive at the end of a step: {size(ends[0])}; {counted(len(ends) - 1, 'step')} later: "
        f"{size(ends[-1])}",
        f"grows by {size(growth.bytes_per_step)} per step (without the first "
        f"{counted(growth.skipped, 'step')})",
    ]
    left = None
    if memory.limit_bytes:
        left = max(0, memory.limit_bytes - memory.peak_bytes) // growth.bytes_per_step
        evidence.append(f"at this rate memory is full in about {counted(left, 'step')}")
    return memory_leak.finding(
        share=min(1.0, growth.bytes_per_step / memory.peak_bytes) if memory.peak_bytes else 0.0,
        of="memory",
        severity="high" if left is not None and left < SOON_STEPS else "medium",
        summary=f"Every step adds {size(growth.bytes_per_step)} that is never released.",
        evidence=tuple(evidence),
        remedies=(remedies.DETACH.offer(), remedies.SNAPSHOT.offer()),
    )


@rule("Memory runs out", part="run")
def allocator_retries(run: RankRun) -> Finding | None:
    """The device's allocator runs out of memory, empties its cache and asks again. Steps
    that are longer and in which the allocator tried again."""
    stall = costly_stall(run, "allocator")
    if stall is None:
        return None
    waits = stalling_steps(stall, run, "waits", "wait")
    return allocator_retries.finding(
        share=stall.share,
        summary=f"{waits} {typical_wait(stall)} while the allocator frees its cache and asks for "
        "memory again.",
        evidence=cost_lines(stall, run),
        where=stall.where,
        remedies=(
            remedies.EXPANDABLE_SEGMENTS.offer(),
            remedies.SMALLER_BATCH.offer(),
            remedies.STEADY_SHAPES.offer(),
        ),
    )


@rule("Recomputation")
def recomputation(evidence: RankEvidence) -> Finding | None:
    """Forward work that backward repeats, so that fewer activations are kept. The cost of
    activation checkpointing; medium at most, because somebody chose it."""
    efficiency = evidence.efficiency
    if efficiency is None:
        return None
    spots = [spot for spot in efficiency.spots if spot.recomputed]
    share = evidence.mean_step_share(sum(spot.device_ns for spot in spots))
    if share < LOW:
        return None
    lines = [f"repeated forward work: {evidence.step_ms(share)}"]
    if efficiency.hardware_flops:
        part = efficiency.recomputed_flops / efficiency.hardware_flops
        lines.append(f"{percent(part)} of the step's FLOPs are done twice")
    if efficiency.mfu is not None and efficiency.hfu is not None and not above_peak(efficiency):
        lines.append(
            f"HFU {percent(efficiency.hfu)} counts them, MFU {percent(efficiency.mfu)} does not"
        )
    return recomputation.finding(
        share=share,
        severity="low" if severity_of(share) == "low" else "medium",
        summary=f"{percent(share)} of the step recomputes activations to save memory.",
        evidence=(
            *lines,
            *(
                spot_words(evidence, spot)
                for spot in sorted(spots, key=lambda spot: -spot.device_ns)[:2]
            ),
        ),
        remedies=(remedies.NO_CHECKPOINT.offer(),),
    )
