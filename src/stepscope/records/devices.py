"""What devices can do at most, by their data sheets: dense peaks, memory, links, each with source.

Data sheets promise, `calibrate` measures: where both exist, the measured figure wins. The rows are
in devices.toml beside this file.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

_VENDOR_WORDS = frozenset({"nvidia", "amd", "tesla", "instinct", "geforce"})
# Drivers keep some memory for themselves (ECC alone takes a sixteenth), and print no more than is.
_LEAST_MEMORY, _MOST_MEMORY = 0.90, 1.03


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One device as PyTorch counts devices (a die of a card that holds two)."""

    name: str
    vendor: str
    peaks: dict[str, float]  # dtype -> dense FLOP/s; fp32 in full precision, without tensor cores
    bandwidth_bytes_s: float
    memory_bytes: int
    multiprocessors: int
    tensor_cores: bool
    link: str
    link_bytes_s: float  # both directions together
    source: str  # title of the document, section or table
    note: str = ""
    printed: tuple[str, ...] = ()  # as drivers print it, less words such as NVIDIA and Tesla


def find_device(
    name: str, memory_bytes: int | None = None, multiprocessors: int | None = None
) -> DeviceSpec | None:
    """The row of the device that a driver prints as `name`, None where nobody can be sure.

    Memory and multiprocessors tell apart devices of one name, and turn down slices of a device.
    """
    asked = _plain(name)
    rows = [row for row in DEVICES if asked in {_plain(row.name), *map(_plain, row.printed)}]
    named = len(rows) == 1 or asked.startswith("mi250x")
    if not named and memory_bytes is None:
        return None
    if memory_bytes is not None:
        rows = [row for row in rows if _holds(row, memory_bytes)]
    if multiprocessors is not None:
        rows = [row for row in rows if row.multiprocessors == multiprocessors]
    if len({tuple(row.peaks.items()) for row in rows}) > 1 and not named:
        return None
    return rows[0] if rows else None


def _holds(row: DeviceSpec, memory_bytes: int) -> bool:
    return _LEAST_MEMORY <= memory_bytes / row.memory_bytes <= _MOST_MEMORY


def _plain(name: str) -> str:
    """Lower case words without vendors: "NVIDIA A100-SXM4-80GB" -> "a100 sxm4 80gb"."""
    words = re.split(r"[\s_/-]+", name.lower().split(":")[0].replace("(tm)", "").strip())
    while words and words[0] in _VENDOR_WORDS:
        words = words[1:]
    return " ".join(words)


def _spec(row: dict[str, Any]) -> DeviceSpec:
    peaks = {dtype: rate * 1e12 for dtype, rate in row["tflops"].items()}
    return DeviceSpec(
        name=row["name"],
        vendor=row["vendor"],
        peaks=peaks,
        bandwidth_bytes_s=row["bandwidth_gb_s"] * 1e9,
        memory_bytes=row["memory_gib"] << 30,
        multiprocessors=row["multiprocessors"],
        tensor_cores=row.get("tensor_cores", True),
        link=row["link"],
        link_bytes_s=row["link_gb_s"] * 1e9,
        source=row["source"],
        note=row.get("note", ""),
        printed=tuple(row["printed"]),
    )


def _read() -> tuple[DeviceSpec, ...]:
    text = Path(__file__).with_name("devices.toml").read_text(encoding="utf-8")
    return tuple(_spec(row) for row in tomllib.loads(text)["device"])


DEVICES = _read()
