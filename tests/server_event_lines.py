"""Read the lines of a parameter server's log back into the records that wrote them."""

from __future__ import annotations

from typing import Any, get_args

from stepscope.fix.server.membership import LostUpdates, ServerEvent, ShardRestored

EVENT_TYPES: dict[str, Any] = {kind.event: kind for kind in get_args(ServerEvent)}


def event_from(values: dict[str, Any]) -> ServerEvent | None:
    """The record of one decoded line; None for an event of a later version. Raises TypeError or
    ValueError where fields are missing."""
    given = dict(values)
    kind = EVENT_TYPES.get(given.pop("event", ""))
    if kind is None:
        return None
    known: dict[str, Any] = {
        name: given[name] for name in kind.__dataclass_fields__ if name in given
    }
    for name in ("members", "lost"):
        if name in known:
            known[name] = tuple(known[name])
    if kind is ShardRestored:
        known["lost"] = tuple(LostUpdates(**one) for one in known["lost"])
    event: ServerEvent = kind(**known)
    return event
