"""One vocabulary for every surface: the parts of a step, their words and their colours."""

from __future__ import annotations

import re

# id -> (word on the screen, what it means in a few words)
PARTS = {
    "compute": ("compute", "kernels (on the CPU: operators) at work"),
    "exposed_comm": ("exposed comm", "communication that nothing hides"),
    "exposed_memory": ("exposed copies", "copies and memsets that nothing hides"),
    "data_loading": ("data loading", "idle: the host waits for a batch"),
    "sync": ("blocking sync", "idle: the host waits for the device"),
    "operators": ("framework", "idle: the host is inside operators"),
    "python": ("python", "idle: the host is in Python, outside operators"),
    "profiler": ("profiler", "idle: the profiler handles its own buffers"),
    "idle_launch": ("launch gaps", "idle: queued, and starting takes a moment"),
    "idle_other": ("other idle", "idle: queued but not started, or not known why"),
}
_NOISE = re.compile(r"^void |at::native::|\(anonymous namespace\)::|std::|c10::")


def short_kernel(name: str, width: int) -> str:
    """A kernel's C++ name, readable: no return type, no namespaces, the middle left out."""
    text = _NOISE.sub("", name)
    text = re.sub(r"\(.*\)\s*(\[.*\])?$", "", text) or name
    if len(text) <= width:
        return text
    keep = max(4, width - 1)
    front = keep * 2 // 3
    return f"{text[:front]}…{text[len(text) - (keep - front) :]}"


def duration(ns: float) -> str:
    """Three significant digits in the unit that suits."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if abs(ns) >= size:
            value = ns / size
            return f"{value:.2f} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{ns:.0f} ns"
