"""Memory that is reserved from the device and holds nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.records.explanation import Finding, Remedy
from stepscope.records.figures import size
from stepscope.records.memory import Fragmentation

if TYPE_CHECKING:
    from stepscope.explain.findings.evidence import Evidence
    from stepscope.records.memory import Memory

SHARE = 0.25
LEAST_BYTES = 256_000_000
CROWDED = 0.80  # of the limit reserved: then what is free inside is missed


def find(evidence: Evidence) -> Finding | None:
    """1 - allocated / reserved at the peak, where that is much."""
    return find_in(evidence.memory) if evidence.memory is not None else None


def find_in(memory: Memory) -> Finding | None:
    """The same of an account of memory alone."""
    missed = _missed(memory)
    found = missed or memory.fragmentation
    if found is None:
        return None
    free = found.reserved_bytes - found.allocated_bytes
    if missed is None and (found.share < SHARE or free < LEAST_BYTES):
        return None
    limit = memory.limit_bytes
    crowded = bool(limit and found.reserved_bytes >= CROWDED * limit)
    return Finding(
        id="fragmentation",
        title="Memory in pieces" if missed else "Reserved and unused memory",
        share=found.share,
        of="memory",
        severity="high" if missed else "medium" if crowded else "low",
        summary=f"{found.share:.0%} of what torch reserved ({size(free)}) holds no tensor "
        + ("where a smaller request failed." if missed else f"at the {found.at}."),
        evidence=tuple(_evidence(memory, found, crowded=crowded, missed=missed is not None)),
        remedies=(
            Remedy(
                id="expandable-segments",
                summary="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets segments grow "
                "instead of leaving holes",
            ),
            Remedy(
                id="steady-shapes",
                summary="the same shapes in every step: pad to a few lengths, drop the last batch",
            ),
        ),
    )


def _missed(memory: Memory) -> Fragmentation | None:
    """The state in which a request failed that was smaller than what was reserved and free.

    The allocator gives whole free segments back before it fails: what is left is in pieces.
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


def _evidence(memory: Memory, found: Fragmentation, *, crowded: bool, missed: bool) -> list[str]:
    lines = [
        f"allocated {size(found.allocated_bytes)} of {size(found.reserved_bytes)} reserved, at the "
        f"{found.at}"
    ]
    last = memory.at_end or found
    if last.largest_free_bytes is not None:
        lines.append(
            f"the largest free block is {size(last.largest_free_bytes)}, in {last.free_blocks} "
            f"free blocks, at the {last.at}"
        )
    if missed:
        lines.append("a request failed that would have fitted into what was reserved and free")
    elif memory.limit_bytes and not crowded:
        lines.append(
            f"{found.reserved_bytes / memory.limit_bytes:.0%} of the memory there is are reserved: "
            "nothing is missing yet"
        )
    return lines
