"""The peaks of devices from their data sheets: dense rates, memory, links, each with its source.

Data sheets promise, `calibrate` measures: if both exist, the measured figure wins. The rows are in
devices.json next to this file.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import msgspec

_AS_BLANKS = str.maketrans("_/-", "   ")
_VENDOR_WORDS = frozenset({"nvidia", "amd", "tesla", "instinct", "geforce"})
# Drivers keep some memory for themselves (ECC alone takes a sixteenth) and print the rest.
_MIN_MEMORY, _MAX_MEMORY = 0.90, 1.03


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One device as PyTorch counts them (one die of a card that holds two)."""

    name: str
    vendor: str
    # dtype -> dense FLOP/s. fp32 in full precision: on NVIDIA without tensor cores, AMD's matrix
    # cores do full fp32. fp64 with tensor or matrix cores if they support it.
    peaks: dict[str, float]
    bandwidth_bytes_s: float
    memory_bytes: int
    multiprocessors: int
    tensor_cores: bool
    link: str
    link_bytes_s: float  # both directions together
    source: str  # title of the document, section or table
    note: str = ""
    printed: tuple[str, ...] = ()  # as drivers print it, without words such as NVIDIA and Tesla


@lru_cache(maxsize=64)
def find_device(
    name: str, memory_bytes: int | None = None, multiprocessors: int | None = None
) -> DeviceSpec | None:
    """The device that a driver prints as `name`; None if that is not certain.

    Memory and multiprocessors distinguish devices with the same name, and exclude slices of a
    device.
    """
    wanted = plain_name(name)
    rows = [
        row for row in DEVICES if wanted in {plain_name(row.name), *map(plain_name, row.printed)}
    ]
    is_certain = len(rows) == 1 or wanted.startswith("mi250x")
    if not is_certain and memory_bytes is None:
        return None
    if memory_bytes is not None:
        rows = [row for row in rows if _fits_memory(row, memory_bytes)]
    if multiprocessors is not None:
        rows = [row for row in rows if row.multiprocessors == multiprocessors]
    if len({tuple(row.peaks.items()) for row in rows}) > 1 and not is_certain:
        return None
    return rows[0] if rows else None


def _fits_memory(row: DeviceSpec, memory_bytes: int) -> bool:
    return _MIN_MEMORY <= memory_bytes / row.memory_bytes <= _MAX_MEMORY


def plain_name(name: str) -> str:
    """Lower case words without vendors: "NVIDIA A100-SXM4-80GB" -> "a100 sxm4 80gb"."""
    words = name.lower().split(":")[0].replace("(tm)", "").translate(_AS_BLANKS).split()
    while words and words[0] in _VENDOR_WORDS:
        words = words[1:]
    return " ".join(words)


class _DeviceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of devices.json, in the units of data sheets."""

    name: str
    printed: tuple[str, ...]
    vendor: str
    tflops: dict[str, float]  # dense: data sheets often print twice as much ("with sparsity")
    bandwidth_gb_s: float
    memory_gib: int  # what data sheets call GB
    multiprocessors: int
    tensor_cores: bool = True
    link: str
    link_gb_s: float
    source: str
    note: str = ""


_SAME = [name for name in _DeviceRow.__struct_fields__ if name in DeviceSpec.__struct_fields__]


def _spec(row: _DeviceRow) -> DeviceSpec:
    return DeviceSpec(
        **{name: getattr(row, name) for name in _SAME},
        peaks={dtype: rate * 1e12 for dtype, rate in row.tflops.items()},
        bandwidth_bytes_s=row.bandwidth_gb_s * 1e9,
        memory_bytes=row.memory_gib << 30,
        link_bytes_s=row.link_gb_s * 1e9,
    )


def _read() -> tuple[DeviceSpec, ...]:
    text = Path(__file__).with_name("devices.json").read_bytes()
    return tuple(map(_spec, msgspec.json.decode(text, type=tuple[_DeviceRow, ...])))


DEVICES = _read()
