"""What `top --json` prints. docs/reference/json.md describes every name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import to_builtins
from msgspec.structs import replace

if TYPE_CHECKING:
    from stepscope.records.live_run import LiveRank, LiveRun

SCHEMA = 1


def live_json(run: LiveRun) -> dict[str, Any]:
    bare = to_builtins(replace(run, ranks=(), earlier=()))
    return {
        "schema": SCHEMA,
        **bare,
        "spread": run.spread,
        "ranks": [_rank(rank) for rank in run.ranks],
        "earlier": [_rank(rank) for rank in run.earlier],
    }


def _rank(rank: LiveRank) -> dict[str, Any]:
    """The figures of the run so far by the names of `explain --json`, without every step."""
    run = to_builtins(replace(rank.run, series=None))
    del run["series"]
    own = to_builtins(replace(rank, run=replace(rank.run, series=None)))
    del own["run"], own["explained_steps"]  # all steps: this is the first look
    return {**run, **own}
