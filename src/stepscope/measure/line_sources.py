"""The text of the files whose lines were marked, kept so that later edits can be followed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.measure import folder as layout
from stepscope.measure.never_raise import never_raise

if TYPE_CHECKING:
    from collections.abc import Iterable

SCHEMA = 1
_MOST_FILES = 200
_MOST_BYTES = 1 << 20  # of a file


@never_raise
def write_sources(folder: Path, files: Iterable[str]) -> None:
    """As they are on disk now, right after the step that ran them."""
    texts = {name: text for name in sorted(files)[:_MOST_FILES] if (text := _text(name))}
    layout.try_write_json(folder / layout.LINES, {"schema": SCHEMA, "texts": texts})


def _text(name: str) -> str | None:
    path = Path(name)
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        return path.read_text(errors="replace")
    except OSError:
        return None
