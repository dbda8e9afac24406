"""What a line costs, in words: at its end, above its function, and when the pointer rests on it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.records.addresses import finding_page
from stepscope.records.figures import mean_count, milliseconds, percent, size
from stepscope.ui.lsp.program_text import syntax_tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from stepscope.records.line_costs import LineCost
    from stepscope.ui.lsp.finding_note import FindingNote, StepWhatIf
    from stepscope.ui.lsp.script_state import ShownLine

SMALLEST_SHARE = 0.001  # of the step, below which a line gets no hint unless it keeps memory
SMALLEST_KEPT = 1_000_000  # bytes
_MOST_ROWS = 6
_MOST_WHATIFS = 3
_BLOCKS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.For, ast.AsyncFor, ast.While)
_STALE = "_Measured before the last edits; the code has changed since._"
_NO_TENSORS = re.compile(r"(, \[\])+\]$")
_ESTIMATED = "_Estimated, not measured: operator times of the last run, shapes of this text._"


@dataclass(frozen=True, slots=True)
class BlockCost:
    """The lines of one function or loop together, at the line that it begins on (from 1)."""

    line: int
    words: str


def is_worth_a_hint(cost: LineCost) -> bool:
    return cost.share >= SMALLEST_SHARE or (cost.kept_bytes or 0) >= SMALLEST_KEPT


def hint_words(shown: ShownLine) -> str:
    """`3.20 ms · 12% · keeps 4.20 MB · 6 calls`; `~` marks an estimate, `was` an old figure."""
    cost = shown.cost
    about = "~" if shown.estimated else ""
    parts = [f"{about}{milliseconds(cost.total_ms)}", f"{about}{percent(cost.share)}"]
    if cost.kept_bytes:
        parts.append(f"keeps {about}{size(cost.kept_bytes)}")
    if cost.calls is not None and cost.calls > 1:
        parts.append(f"{mean_count(cost.calls)} calls")
    words = " · ".join(parts)
    return f"was {words}" if shown.trust == "stale" else words


def block_costs(text: str, lines: Sequence[ShownLine]) -> list[BlockCost]:
    """Functions and loops whose own lines take time, without loops that are all of their function;
    none while the text is not Python."""
    tree = syntax_tree(text)
    if tree is None:
        return []
    blocks = [node for node in ast.walk(tree) if isinstance(node, _BLOCKS)]
    costs: dict[frozenset[int], BlockCost] = {}
    for block in sorted(blocks, key=lambda node: node.lineno):  # the outer ones first
        inside = [one for one in lines if block.lineno <= one.line <= (block.end_lineno or 0)]
        worth = frozenset(one.line for one in inside if is_worth_a_hint(one.cost))
        if worth and worth not in costs:
            costs[worth] = BlockCost(block.lineno, _block_words(inside))
    return list(costs.values())


def _block_words(lines: Sequence[ShownLine]) -> str:
    about = "~" if any(one.estimated for one in lines) else ""
    total = sum(one.cost.total_ms for one in lines)
    share = sum(one.cost.share for one in lines)
    kept = [one.cost.kept_bytes for one in lines if one.cost.kept_bytes is not None]
    parts = [f"{about}{milliseconds(total)}", f"{about}{percent(share)} of the step"]
    if sum(kept):
        parts.append(f"keeps {about}{size(sum(kept))}")
    words = " · ".join(parts) + " in its own lines"
    return f"was {words}" if any(one.trust == "stale" for one in lines) else words


def hover_words(
    lines: Sequence[ShownLine], findings: Iterable[FindingNote], whatifs: Iterable[StepWhatIf]
) -> str:
    """Markdown: the breakdown of a line, the findings about it, and what would help the step."""
    parts: list[str] = []
    for shown in lines:
        parts += [f"**{hint_words(shown)}**", *_cautions(shown), *_tables(shown.cost)]
    parts += [
        f"**[{finding.title}]({finding_page(finding.id)})**: {finding.summary}"
        for finding in findings
    ]
    if lines:
        parts += list(_whatifs(whatifs))
    return "\n\n".join(part for part in parts if part)


def _cautions(shown: ShownLine) -> Iterator[str]:
    if shown.trust == "stale":
        yield _STALE
    elif shown.estimated:
        yield _ESTIMATED


def _tables(cost: LineCost) -> Iterator[str]:
    phases = [
        ("forward", cost.forward_ms),
        ("backward", cost.backward_ms),
        ("optimizer", cost.optimizer_ms),
        ("other", cost.other_ms),
    ]
    rows = [(name, milliseconds(ms), _part(ms, cost.total_ms)) for name, ms in phases if ms]
    yield _table(("phase", "ms a step", "of the line"), rows)
    if cost.kept_bytes is not None:
        yield f"{size(cost.kept_bytes)} saved for backward"
    operators = sorted(cost.operators, key=lambda one: -one.ms)[:_MOST_ROWS]
    yield _table(
        ("operator", "calls", "ms a step", "shapes"),
        [
            (_code(one.name), mean_count(one.calls), milliseconds(one.ms), _shapes(one.shapes))
            for one in operators
        ],
    )
    kernels = sorted(cost.kernels, key=lambda one: -one.ms)[:_MOST_ROWS]
    yield _table(
        ("kernel", "ms a step"), [(_code(one.name), milliseconds(one.ms)) for one in kernels]
    )


def _whatifs(whatifs: Iterable[StepWhatIf]) -> Iterator[str]:
    faster = list(whatifs)[:_MOST_WHATIFS]
    if faster:
        yield "What if, for the whole step:"
        yield _table(
            ("change", "gain"),
            [(f"{_cell(one.label)} ({_code(one.setting)})", one.gain) for one in faster],
        )


def _part(ms: float, total_ms: float) -> str:
    return percent(ms / total_ms) if total_ms else ""


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Empty without rows."""
    if not rows:
        return ""
    ruler = tuple("---" for _ in head)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ruler, *rows))


def _cell(text: str) -> str:
    """Text of others inside a table: no row or column may begin in it."""
    return " ".join(text.replace("|", "\\|").split())


def _shapes(shapes: str | None) -> str:
    """Without the empty ones that stand for options after the last tensor."""
    return _code(_NO_TENSORS.sub("]", shapes or ""))


def _code(text: str) -> str:
    words = _cell(text.replace("`", "'"))
    return f"`{words}`" if words else ""
