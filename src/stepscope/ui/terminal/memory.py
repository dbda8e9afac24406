"""Memory in a terminal: the peak as one bar, what holds it, what would fit, ZeRO by formula."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from stepscope.explain.memory.model import LABELS
from stepscope.records.memory import Memory, Theory
from stepscope.text.figures import percent, size
from stepscope.text.words import counted
from stepscope.ui.terminal.console import FAINT, draw_bar, draw_legend, text_line, titled_table
from stepscope.ui.topics.device_use import (
    batch_words,
    memory_headline,
    place_words,
    saving_words,
    shown_categories,
    theory_words,
    unknown_categories,
    zero_rows,
)
from stepscope.ui.words import one_line, short_kernel

_COLOURS = {
    "parameters": "blue",
    "gradients": "magenta",
    "optimizer": "cyan",
    "activations": "green",
    "buffers": "bright_blue",
    "temporaries": "yellow",
    "other": "bright_black",
}
_FILLS = dict(zip(_COLOURS, "█▓≡▒▪░·", strict=True))
_RANKS = (1, 2, 8, 64, 512)
_TIMES_THE_JOB = 8
_MOST_ROWS = 5


def memory_sections(
    memory: Memory, *, top: int = 8, width: int = 100, ranks: int = 1
) -> Iterator[RenderableType]:
    """Measurements first, then what follows from them; ZeRO only for several ranks."""
    yield Text.assemble(("memory  ", "bold"), text_line(memory_headline(memory)))
    shown = shown_categories(memory)
    if len(shown) > 1:
        whole = sum(held for _, held in shown)
        yield draw_bar(
            [(held / whole, _FILLS[name], _COLOURS[name]) for name, held in shown], width
        )
        legend = [
            (_FILLS[name], _COLOURS[name], f"{LABELS[name]:<15}", size(held), held / whole)
            for name, held in shown
        ]
        yield draw_legend(legend, width, room=36)
    yield Text("\n".join(map(one_line, _remarks(memory))), style=FAINT)
    yield Text()
    most = min(top, _MOST_ROWS)
    if memory.by_site:
        yield from (_sites(memory, most, width), Text())
    if memory.by_module and memory.source != "snapshot":
        whole = sum(row.size_bytes for row in memory.by_module) or 1
        room = max(16, width - 24)
        rows = [
            (size(row.size_bytes), percent(row.size_bytes / whole), short_kernel(row.module, room))
            for row in memory.by_module[:most]
        ]
        yield titled_table("activations", ">size", ">share", "by module", rows=rows)
        yield Text()
    if ranks > 1 and memory.theory is not None and memory.theory.parameters_bytes:
        yield from (_zero(memory.theory, ranks), Text())


def _remarks(memory: Memory) -> list[str]:
    lines = []
    if memory.pools:
        kept = sum(pool.size_bytes for pool in memory.pools)
        lines.append(f"CUDA graphs keep {size(kept)} in {counted(len(memory.pools), 'pool')}")
    if memory.largest_batch is not None:
        lines.append(batch_words(memory.largest_batch))
    if memory.saving is not None:
        lines.append(saving_words(memory.saving))
    if memory.theory is not None and (words := theory_words(memory.theory)):
        lines.append(words)
    unknown = unknown_categories(memory)
    if unknown and memory.source != "snapshot":
        lines.append(f"not captured: {', '.join(unknown)}")
    return [*lines, *memory.notes]


def _sites(memory: Memory, most: int, width: int) -> Table:
    rows = [
        (
            size(site.size_bytes),
            percent(site.size_bytes / memory.peak_bytes) if memory.peak_bytes else "",
            str(site.blocks or ""),
            LABELS[site.category] if site.category else "",
            short_kernel(site.operator, 30),
            short_kernel(place_words(site), max(16, width - 76)),
        )
        for site in memory.by_site[:most]
    ]
    columns = (">size", ">share", ">blocks", "for", "operator", "where")
    return titled_table("held at the peak, by operator that allocated it", *columns, rows=rows)


def _zero(theory: Theory, ranks: int) -> Table:
    """For up to eight times as many ranks as the job has."""
    shown = tuple(count for count in _RANKS if count <= _TIMES_THE_JOB * ranks)
    title = "parameters, gradients and optimizer state per rank, by formula"
    columns = ["ZeRO", *(f">{counted(count, 'rank')}" for count in shown), ">traffic"]
    rows = [
        (
            f"stage {stage}" if stage else "none",
            *(size(row.size_bytes) for row in cells),
            f"{cells[0].volume:g}x",
        )
        for stage, cells in zero_rows(theory, shown)
    ]
    return titled_table(title, *columns, rows=rows)
