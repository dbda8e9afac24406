"""Memory in a terminal: the peak as one bar, what holds it, what would fit, ZeRO by formula."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from stepscope.explain.memory.model import LABELS
from stepscope.records.memory import Memory, Theory
from stepscope.text.figures import percent, size
from stepscope.text.words import counted
from stepscope.ui.terminal.console import draw_bar, draw_legend, text_line, titled_table
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
) -> list[RenderableType]:
    """Measurements first, then what follows from them; ZeRO only for several ranks."""
    out: list[RenderableType] = [
        Text.assemble(("memory  ", "bold"), text_line(memory_headline(memory)))
    ]
    shown = shown_categories(memory)
    if len(shown) > 1:
        whole = sum(held for _, held in shown)
        parts = [(held / whole, _FILLS[name], _COLOURS[name]) for name, held in shown]
        out += [draw_bar(parts, width), _legend(shown, whole, width)]
    out += [_remarks(memory), Text()]
    rows = min(top, _MOST_ROWS)
    if memory.by_site:
        out += [_sites(memory, rows, width), Text()]
    if memory.by_module and memory.source != "snapshot":
        out += [_modules(memory, rows, width), Text()]
    if ranks > 1 and memory.theory is not None and memory.theory.parameters_bytes:
        out += [_zero(memory.theory, ranks), Text()]
    return out


def _legend(shown: list[tuple[str, int]], whole: int, width: int) -> Table:
    parts = [
        (_FILLS[name], _COLOURS[name], f"{LABELS[name]:<15}", size(held), held / whole)
        for name, held in shown
    ]
    return draw_legend(parts, width, room=36)


def _remarks(memory: Memory) -> Text:
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
    lines += memory.notes
    return Text("\n".join(map(one_line, lines)), style="bright_black")


def _sites(memory: Memory, most: int, width: int) -> Table:
    columns = (">size", ">share", ">blocks", "for", "operator", "where")
    table = titled_table("held at the peak, by operator that allocated it", *columns)
    for site in memory.by_site[:most]:
        table.add_row(
            size(site.size_bytes),
            percent(site.size_bytes / memory.peak_bytes) if memory.peak_bytes else "",
            str(site.blocks) if site.blocks else "",
            LABELS[site.category] if site.category else "",
            short_kernel(site.operator, 30),
            short_kernel(place_words(site), max(16, width - 76)),
        )
    return table


def _modules(memory: Memory, most: int, width: int) -> Table:
    table = titled_table("activations", ">size", ">share", "by module")
    whole = sum(row.size_bytes for row in memory.by_module) or 1
    for row in memory.by_module[:most]:
        table.add_row(
            size(row.size_bytes),
            percent(row.size_bytes / whole),
            short_kernel(row.module, max(16, width - 24)),
        )
    return table


def _zero(theory: Theory, ranks: int) -> Table:
    """For up to eight times as many ranks as the job has."""
    shown = tuple(count for count in _RANKS if count <= _TIMES_THE_JOB * ranks)
    columns = ["ZeRO", *(f">{counted(count, 'rank')}" for count in shown), ">traffic"]
    title = "parameters, gradients and optimizer state per rank, by formula"
    table = titled_table(title, *columns)
    for stage, rows in zero_rows(theory, shown):
        cells = [size(row.size_bytes) for row in rows]
        table.add_row("none" if stage == 0 else f"stage {stage}", *cells, f"{rows[0].volume:g}x")
    return table
