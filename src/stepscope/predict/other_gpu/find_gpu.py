"""A GPU by its name, a short name such as H100, or a file about it."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.predict.other_gpu.gpu import (
    Gpu,
    GpuRow,
    find_row,
    gpu_rows,
    make_gpu,
    with_profile,
)
from stepscope.records.addresses import SITE
from stepscope.records.devices import plain_name
from stepscope.trace.profiles import read_profile
from stepscope.trace.regular_files import read_whole

_PAGE = f"{SITE}/reference/devices/"
_FILE_HELP = (
    "or give a file: what `stepscope calibrate` wrote on that GPU, or its data sheet as JSON "
    f"({_PAGE})"
)


def find_gpu(text: str) -> Gpu:
    """Raises UsageError with the nearest names for a GPU that is not in the table."""
    if row := find_row(text) or _by_short_name(text):
        return make_gpu(row)
    path = Path(text)
    if path.suffix == ".json" or path.exists():
        return read_gpu(path)
    names = [row.gpu for row in gpu_rows()]
    lower = {name.lower(): name for name in names}
    begins = [name for name in names if name.lower().startswith(text.lower())]
    near = begins[:3] or [lower[name] for name in get_close_matches(text.lower(), lower, 3, 0.4)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(names)};"
    raise UsageError(f"there is no GPU {text!r} in the table. {hint} {_FILE_HELP}")


def other_boards(text: str) -> tuple[str, ...]:
    """Boards that a short name could mean as well, such as the PCIe one for H100."""
    if find_row(text):
        return ()
    boards = _boards(text)
    chosen = _by_short_name(text)
    return tuple(row.gpu for row in boards if chosen and row.gpu != chosen.gpu)


def _boards(text: str) -> list[GpuRow]:
    start = f"{plain_name(text)} "
    return [row for row in gpu_rows() if start.strip() and plain_name(row.gpu).startswith(start)]


def _by_short_name(text: str) -> GpuRow | None:
    """The board with the fastest links, then the most memory, then the most watts."""
    boards = _boards(text)
    return max(boards, key=lambda row: (row.watts, row.memory_gib)) if boards else None


def read_gpu(path: Path) -> Gpu:
    """A calibration made on the GPU, or its data sheet."""
    body = _read_object(path)
    if "matmul_flops" in body:
        return _calibrated(path)
    if "times" in body:
        raise UnreadableInputError(
            f"{path} holds operator times. Import them with `stepscope probe import "
            f"{path}`, then name the GPU"
        )
    try:
        row = msgspec.convert(body, GpuRow)
    except msgspec.ValidationError as error:
        raise UnreadableInputError(
            f"{path} does not describe a GPU: {error}. Its fields: {_PAGE}"
        ) from None
    base = find_row(row.device) if row.device else None
    if row.device and base is None:
        raise UnreadableInputError(f"{path}: there is no device {row.device!r} in the table")
    missing = [
        name
        for name in ("tflops", "bandwidth_gb_s", "memory_gib", "multiprocessors")
        if not getattr(row if base is None else base, name)
    ]
    numbers = (row.boost_mhz, row.l2_mb, row.watts, row.threads, row.lanes, *row.tflops.values())
    if missing or min(numbers) <= 0:
        what = f"{', '.join(missing)} missing" if missing else "every figure must be above 0"
        raise UnreadableInputError(f"{path} does not describe a GPU: {what}")
    return make_gpu(row if base is None else base)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(read_whole(path), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise UnreadableInputError(f"{path} is not a JSON object: {error}") from None


def _calibrated(path: Path) -> Gpu:
    profile = read_profile(path)
    row = find_row(profile.device)
    if row is None:
        raise UnreadableInputError(
            f"{path} was measured on {profile.device or 'a CPU'}, which is not in the table of GPUs"
        )
    return with_profile(make_gpu(row), profile)
