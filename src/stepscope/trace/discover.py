"""Which trace files a path stands for: a file, a run folder, or a folder of traces."""

from __future__ import annotations

from pathlib import Path

from stepscope.errors import UnreadableInputError

_ENDINGS = (".json", ".json.gz", ".json.zst", ".sqlite")


def find_traces(path: str | Path) -> list[Path]:
    """Raises UnreadableInputError when there is nothing to read."""
    path = Path(path)
    if not path.is_dir():
        if not path.exists():
            raise UnreadableInputError(f"{path} does not exist")
        return [path]
    try:
        found = sorted(path.glob("rank-*/trace.json*")) or _traces_in(path)
        found = found or [trace for inner in sorted(path.iterdir()) for trace in _traces_in(inner)]
    except PermissionError as error:
        raise UnreadableInputError(f"{error.filename}: no permission to read it") from None
    if not found:
        endings = ", ".join(f"*{ending}" for ending in _ENDINGS)
        raise UnreadableInputError(f"{path} holds no trace: looked for {endings}")
    return found


def _traces_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(file for file in folder.iterdir() if file.name.endswith(_ENDINGS))
