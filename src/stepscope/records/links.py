"""What a rank's TCP connections have sent, and what that says about the links between hosts."""

from __future__ import annotations

import msgspec

from stepscope.records.limits import Bytes, Count  # noqa: TC001  (decoded)


class PeerTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's connections from one of its addresses to one other, from the first look to the
    last. Connections that sent less than a megabyte do not count."""

    local: str
    peer: str
    connections: Count = 1
    sent_bytes: Bytes
    busy_us: Count  # something was waiting to be sent or acknowledged; summed over connections
    receiver_limited_us: Count = 0  # of that, the receiver had no room
    retransmitted: Count = 0  # segments
    rtt_us: Count | None = None  # the shortest round trip
    delivery_bytes_s: Bytes | None = None  # the kernel's own estimate; median over looks


class RankLinks(msgspec.Struct, frozen=True, kw_only=True):
    """links.json."""

    addresses: list[str] = []  # by which others reach this rank's host
    peers: list[PeerTraffic] = []
    steps: list[Count] = []  # before which the first and the last look came
    device_mbit_s: dict[str, Count] = {}  # of the network device that has the address


class HostLink(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of one host sent to those of another. Rates are those of one connection while
    it sends, in bytes per second."""

    sender: str
    receiver: str
    connections: int
    sent_bytes: int
    steady_bytes_s: float  # bytes / (busy - limited by the receiver)
    rate_bytes_s: float  # that, or the kernel's estimate where it is higher
    rtt_us: int | None
    retransmitted: int
    needs_step_ns: float  # how long the busiest connection needs for a step's bytes, at its rate
    device_bytes_s: float | None = None  # of the sender's network device
