"""Memory that torch has reserved from the device and that holds no tensor."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope import changes as remedies
from stepscope.explain.findings.evidence import from_memory
from stepscope.explain.findings.rule import Finding, FindingRule
from stepscope.records.memory import Fragmentation, Memory
from stepscope.text.figures import percent, size
from stepscope.text.words import counted

SHARE = 0.25
LEAST_BYTES = 256_000_000
CROWDED = 0.80  # of the limit is reserved: the unused part is then missed


def find_in(memory: Memory) -> Finding | None:
    """1 - allocated / reserved at the peak, where that is a lot."""
    missed = _missed(memory)
    state = missed or memory.fragmentation
    if state is None:
        return None
    free = state.reserved_bytes - state.allocated_bytes
    if missed is None and (state.share < SHARE or free < LEAST_BYTES):
        return None
    limit = memory.limit_bytes
    crowded = bool(limit and state.reserved_bytes >= CROWDED * limit)
    return RULE.finding(
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


RULE = FindingRule(
    id="fragmentation", title="Reserved but unused memory", find=from_memory(find_in)
)
