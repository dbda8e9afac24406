"""Which files in a folder are NCCL logs."""

from __future__ import annotations

from pathlib import Path

from stepscope.errors import UnreadableInputError
from stepscope.trace.files import ByteSource
from stepscope.trace.nccl_log.lines import ANSI, split_prefix

_ENDINGS = (".log", ".txt", ".out", ".err", ".log.gz", ".log.zst", ".txt.gz")


def find_nccl_logs(path: str | Path) -> list[Path]:
    """The logs in a folder; for a file, the file itself.

    In a folder a file counts when its first half megabyte has a line of NCCL's.
    """
    path = Path(path)
    if not path.is_dir():
        if not path.exists():
            raise UnreadableInputError(f"{path} does not exist")
        return [path]
    try:
        files = [*path.iterdir(), *path.glob("rank-*/*")]
    except PermissionError as error:
        raise UnreadableInputError(f"{error.filename}: no permission to read it") from None
    return sorted(file for file in files if _may_be_log(file) and is_nccl_log(file))


def _may_be_log(file: Path) -> bool:
    return file.is_file() and is_log_name(file.name)


def is_log_name(name: str) -> bool:
    """Whether a file may be one of NCCL's logs."""
    name = name.lower()
    return name.startswith(("nccl", "rccl")) or name.endswith(_ENDINGS)


def is_nccl_log(file: Path) -> bool:
    try:
        head = next(iter(ByteSource(file)), b"")
    except UnreadableInputError:
        return False
    lines = (ANSI.sub(b"", line) for line in head.split(b"\n") if b"CCL" in line)
    return any(map(split_prefix, lines))
