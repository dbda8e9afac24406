"""Make the tables of docs/reference/devices.md from the table of devices."""

from __future__ import annotations

from page_text import table

from stepscope.records.hardware import DEVICES, DeviceSpec

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")
GIB = 1 << 30
_HEAD = ("Device", *DTYPES, "Bandwidth", "Memory", "Multiprocessors", "Link")


def peaks_table(_: str) -> str:
    return table(_HEAD, map(_peaks, DEVICES))


def sources_table(_: str) -> str:
    """Return one row per source: devices that share one share a row."""
    by_source: dict[str, list[str]] = {}
    for device in DEVICES:
        source = f"{device.source}. {device.note}".rstrip()
        by_source.setdefault(source, []).append(device.name)
    rows = ((", ".join(names), source) for source, names in by_source.items())
    return table(("Device", "Source"), rows)


def _peaks(device: DeviceSpec) -> tuple[str, ...]:
    rates = (device.peaks.get(dtype) for dtype in DTYPES)
    return (
        device.name,
        *("" if rate is None else f"{rate / 1e12:g}" for rate in rates),
        f"{device.bandwidth_bytes_s / 1e9:g}",
        f"{device.memory_bytes // GIB}",
        f"{device.multiprocessors}",
        f"{device.link}, {device.link_bytes_s / 1e9:g}",
    )
