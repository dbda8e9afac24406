"""What a rank on trial leaves beside its steps: trial.json (losses, peak) and script.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from stepscope.errors import UnreadableInputError
from stepscope.records.limits import Bytes, Count  # noqa: TC001  (decoded at run time)
from stepscope.records.script_facts import ScriptFacts
from stepscope.trace.decode import NotJsonError, Oddities, decode
from stepscope.trace.regular_files import read_whole
from stepscope.trace.side_files import read_record

if TYPE_CHECKING:
    from pathlib import Path

TRIAL, SCRIPT, ENOUGH = "trial.json", "script.json", "enough"
_MOST_BYTES = 64 << 20


class TrialPeak(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that the rank's process had at most; None if not known."""

    device: Bytes | None = None
    host: Bytes | None = None


class CapturedTrial(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's trial.json: each loss with its step, as hexadecimal digits to the last bit."""

    losses: list[tuple[Count, str]] = []
    peak: TrialPeak = TrialPeak()


def read_trial(rank: Path) -> CapturedTrial | None:
    """None if the rank did not get to its end."""
    return read_record(rank / TRIAL, CapturedTrial, Oddities(TRIAL), _MOST_BYTES)


def read_script(rank: Path) -> ScriptFacts | None:
    """What the rank's script is made of; None if that was not written or cannot be read."""
    try:
        content = decode(read_whole(rank / SCRIPT, _MOST_BYTES), dict[str, Any])
        return ScriptFacts.from_json(content)
    except (UnreadableInputError, NotJsonError, TypeError, KeyError, ValueError):
        return None
