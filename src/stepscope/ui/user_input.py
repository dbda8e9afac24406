"""Read what people type: sizes, times and shares such as 24GB, 10m and 3%, and files to write."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path

from stepscope.errors import UsageError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}i": 1 << 10 * power for power, unit in enumerate("KMGT", 1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]i?)?B?", re.IGNORECASE)
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(ms|[smh]?)(?:in)?")


def parse_size(text: str, option: str) -> int:
    """Return bytes for 8GB, 24GiB or a number of bytes. Raise UsageError."""
    match = _SIZE.fullmatch(text.strip())
    size = round(float(match[1]) * _UNITS[(match[2] or "").capitalize()]) if match else 0
    if size <= 0:
        raise UsageError(f"{option} {text!r}: write 8GB, 24GiB or a number of bytes")
    return size


def parse_time(text: str, option: str, least: float = 0.0, most: float = math.inf) -> float:
    """Return seconds for 10m, 90s, 1.5h, 500ms or a number of seconds. Raise UsageError."""
    match = _TIME.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else -1.0
    if match is None or (seconds <= 0 and not least):
        raise UsageError(f"{option} {text!r}: write 10m, 90s or 1h")
    if not least <= seconds <= most:
        limit = f"{least:g} s or more" if most == math.inf else f"{least:g} to {most:g} s"
        raise UsageError(f"{option} {text!r} is not in the range: {limit}")
    return seconds


def parse_share(value: object) -> float | None:
    """Return the share that 3%, "0.03" or 0.03 names; None for anything else."""
    try:
        if isinstance(value, str):
            text = value.strip()
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        else:
            share = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return share if 0 <= share < math.inf else None


def require_folder(file: Path | None, option: str = "") -> None:
    """Raise UsageError before anything is measured or read."""
    if file is not None and not file.absolute().parent.is_dir():
        raise UsageError(f"{option} {file}: its folder does not exist".lstrip())


@contextlib.contextmanager
def writing(file: Path, option: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        words = f"{option} {file} could not be written: {error.strerror}"
        raise UsageError(words.lstrip()) from None
