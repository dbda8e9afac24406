"""The file of saved steps that `@pytest.mark.stepscope_budget(over_baseline=...)` compares with."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.measure import folder as layout
from stepscope.records.processors import allowed_cores, processor_name
from stepscope.trace.decode import NotJsonError, decode
from stepscope.trace.files import may_exist, read_whole

_SCHEMA = 1
_MOST_BYTES = 64 << 20


class SavedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One test's step, and the machine it was timed on."""

    rounds_ms: tuple[float, ...]
    processor: str
    cores: int
    device: str | None = None
    torch: str | None = None


class StepBaseline(msgspec.Struct, frozen=True, kw_only=True):
    """All saved steps, by the test's id."""

    schema: int = _SCHEMA
    steps: dict[str, SavedStep] = {}


def read_baseline(file: Path) -> StepBaseline:
    """Read the file; an empty baseline if there is none yet."""
    if not may_exist(file):
        return StepBaseline()
    try:
        baseline = decode(read_whole(file, _MOST_BYTES), StepBaseline)
    except NotJsonError as error:
        raise UnreadableInputError(
            f"{file} is not what pytest --stepscope-save writes: {error}"
        ) from None
    if baseline.schema != _SCHEMA:
        raise UnreadableInputError(
            f"{file} has schema {baseline.schema}, this stepscope reads {_SCHEMA}: save it again"
        )
    for test, step in baseline.steps.items():
        if len(step.rounds_ms) < 2 or min(step.rounds_ms) <= 0:
            raise UnreadableInputError(f"{file}: {test} has no times: save it again")
    return baseline


def save_step(file: Path, test: str, step: SavedStep) -> None:
    """Add or replace one test's step; the others stay."""
    steps = {**read_baseline(file).steps, test: step}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        layout.write_json(
            file, msgspec.to_builtins(StepBaseline(steps=dict(sorted(steps.items()))))
        )
    except OSError as error:
        raise UsageError(f"{file} could not be written: {layout.why_refused(error)}") from None


def step_here(rounds_ms: tuple[float, ...]) -> SavedStep:
    """Describe the step with this machine; the device is the one that the test used."""
    torch = sys.modules.get("torch")
    cuda = torch is not None and torch.cuda.is_initialized()
    return SavedStep(
        rounds_ms=rounds_ms,
        processor=processor_name(),
        cores=allowed_cores(),
        device=str(torch.cuda.get_device_name()) if torch is not None and cuda else None,
        torch=str(torch.__version__) if torch is not None else None,
    )


def unlike_machine(base: SavedStep, now: SavedStep) -> str | None:
    """Return what differs, in words; None on a machine of the same kind."""
    for name in ("processor", "cores", "device"):
        before, after = getattr(base, name), getattr(now, name)
        if before != after:
            return f"{name} {after or 'unknown'}, the baseline's {before or 'unknown'}"
    return None
