"""The two spellings of one change: as `whatif --set` predicts it, as `run --with` applies it.

Both verbs take both. What they print is their own spelling.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

# What `whatif` says, what `run --with` and `tune --only` say. An id that stands without a value
# means the first value of its fix.
_PAIRS = (
    ("precision=tf32", "tf32"),
    ("precision=bf16", "bf16"),
    ("precision=fp16", "fp16"),
    ("optimizer=fused", "fused-optimizer"),
    ("optimizer=foreach", "foreach-optimizer"),
    ("checkpoint=blocks", "activation-checkpointing"),
    ("scan", "scan-backward"),
    ("loader-workers=2", "loader-workers"),
    ("bucket-mb=5", "bucket-mb"),
    ("save-memory=5%", "save-memory"),
    ("threads=fit", "threads=cores"),
    ("threads=fit", "threads"),
    ("threads=1", "one-thread"),
)
WHATIF_OF = {fix: whatif for whatif, fix in _PAIRS}
FIX_OF = dict(reversed(_PAIRS))
# A finding's own name for a mode of torch.compile; `whatif` knows it from the what-if.
FIX_OF["reduce-overhead"] = "compile=reduce-overhead"

_MOST_NEAR = 3


def did_you_mean(text: str, known: Collection[str]) -> str:
    """Return '; did you mean A or B?', or '' if nothing known is spelled like `text`."""
    parts = set(text.lower().replace("_", "-").replace("=", "-").split("-"))
    alike = [name for name in known if parts & set(name.replace("=", "-").split("-"))]
    near = [*get_close_matches(text, list(known), 2), *alike]
    near = list(dict.fromkeys(near))[:_MOST_NEAR]
    return f"; did you mean {' or '.join(near)}?" if near else ""
