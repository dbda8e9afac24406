"""The parts of a step: what each is called, and its colour on every surface.

report.css has the same colours, and others for dark pages; a test holds the two together.
"""

from __future__ import annotations

from typing import NamedTuple


class StepPart(NamedTuple):
    label: str
    colour: str  # on a light page
    ansi: str  # the nearest colour that a terminal has a name for


# id of a part -> how it looks
STEP_PARTS = {
    "compute": StepPart("Compute", "#3f73c9", "blue"),
    "exposed_comm": StepPart("Exposed comm", "#e8742c", "dark_orange"),
    "exposed_memory": StepPart("Exposed copies", "#0d9488", "cyan"),
    "data_loading": StepPart("Data loading", "#c2417c", "magenta"),
    "sync": StepPart("Blocking sync", "#8c2f5f", "deep_pink4"),
    "operators": StepPart("Operator calls", "#d9c36a", "yellow"),
    "python": StepPart("Python", "#a09a2e", "yellow4"),
    "profiler": StepPart("Profiler", "#9aa3af", "bright_black"),
    "idle_launch": StepPart("Launch latency", "#7cc4e4", "sky_blue2"),
    "idle_other": StepPart("Other idle", "#c5cad2", "white"),
    "stall_data": StepPart("Data stalls", "#c2417c", "magenta"),
    "stall_evaluation": StepPart("Evaluation", "#7a5cc9", "medium_purple"),
    "stall_checkpoint": StepPart("Checkpoints", "#b58900", "dark_goldenrod"),
    "stall_gc": StepPart("GC pauses", "#4c9a5b", "green"),
    "stall_compile": StepPart("Compilation", "#0b98b0", "dark_cyan"),
    "stall_allocator": StepPart("Alloc retries", "#a0522d", "orange4"),
    "stall_collective": StepPart("Rank waits", "#e8742c", "dark_orange"),
    "stall_operating_system": StepPart("System stalls", "#4b5563", "bright_black"),
    "stall_logging": StepPart("Logging", "#8f8a26", "yellow4"),
    "stall_unknown": StepPart("Other stalls", "#8a93a0", "white"),
    "stall_collecting": StepPart("Collecting", "#7a5cc9", "medium_purple"),
    "stall_generating": StepPart("Generating", "#7a5cc9", "medium_purple"),
    "stall_without_gradients": StepPart("No gradients", "#7a5cc9", "medium_purple"),
}
