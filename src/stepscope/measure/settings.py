"""What to capture. Travels to every process of the job as JSON in one environment variable."""

from __future__ import annotations

import base64
import json
import os
from dataclasses import asdict, dataclass, fields

VARIABLE = "STEPSCOPE_CAPTURE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run's settings; step numbers count from 0 at the first step seen."""

    folder: str
    wait: int | None = None  # None: early windows first, then one after the default wait
    warmup: int = 2
    active: int = 3
    repeat: int = 1
    every: int = 0  # a window every so many steps, through the whole run; 0: none
    on_stall: bool = False  # a window around a stall that comes again
    shapes: bool = True
    stacks: bool = False
    modules: bool = False
    memory: bool = True
    lines: bool = False  # which line of the user's code ran what, in two more steps
    nvtx: bool = False
    sample_hz: float = 100.0
    step_on: str = "auto"  # one of STEP_ON, or call
    nccl_debug: bool = False
    ranks: str = "auto"  # which ranks record traces, as `--ranks` has it
    remedies: tuple[str, ...] = ()  # what the fix room applies, as `--with` has it
    script_facts: bool = False  # keep what the script is made of (script.json)
    trial: bool = False  # keep losses, the peak of memory and what the script is made of
    hang_after: float = 30.0  # seconds without a step that may be a hang; 0: hangs are not watched
    stop_after: int = 0  # steps, after which every rank ends itself; 0: never

    def to_environment(self, *, plain: bool = False) -> dict[str, str]:
        """`plain` for launchers that put the value into a shell's line unquoted: base64."""
        text = json.dumps(asdict(self), separators=(",", ":"))
        return {VARIABLE: base64.b64encode(text.encode()).decode() if plain else text}

    @classmethod
    def from_environment(cls) -> Settings | None:
        """The settings that `stepscope run` handed down, or None."""
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        values = json.loads(text if text.startswith("{") else base64.b64decode(text))
        known = {field.name for field in fields(cls)}
        values["remedies"] = tuple(values.get("remedies", ()))  # JSON knows lists only
        return cls(**{key: value for key, value in values.items() if key in known})
