"""script.json: what a rank on trial says its training script is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.errors import UnreadableInputError
from stepscope.records.script_facts import ScriptFacts
from stepscope.trace.decode import NotJsonError, decode
from stepscope.trace.regular_files import read_whole

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = "script.json"
_MOST_BYTES = 64 << 20


def read_script(rank: Path) -> ScriptFacts | None:
    """None if that was not written or cannot be read."""
    try:
        content = decode(read_whole(rank / SCRIPT, _MOST_BYTES), dict[str, Any])
        return ScriptFacts.from_json(content)
    except (UnreadableInputError, NotJsonError, TypeError, KeyError, ValueError):
        return None
