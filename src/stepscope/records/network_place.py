"""Where a host stands in the network, as its environment tells. Unknown is None."""

from __future__ import annotations

import msgspec


class NetworkPlace(msgspec.Struct, frozen=True, kw_only=True):
    rack: str | None = None
    switch: str | None = None  # the one that the host is plugged into
    switches: tuple[str, ...] = ()  # from the top of the network down to `switch`
