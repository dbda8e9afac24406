"""The names of encodings, as plans write them: a word, then what it needs to know.

bits | two-valued | window 2,2/2,2/0,0/1,1/8,8 | sparse 0.51 | narrow uint8     hold a value
sign | shape | above 0 | within -1.0 1.0 | ...                                  for one consumer
bf16 | fp16 | fp8-e4m3 | fp8-e5m2 | 4-bit                                       lossy
offload 12 40                                                                   in host memory
"""

from __future__ import annotations

from dataclasses import dataclass

LOSSY = ("bf16", "fp16", "fp8-e4m3", "fp8-e5m2", "4-bit")
OFFLOAD = "offload"
_WAITING = ("sparse", "narrow")


def is_lossy(encoding: str) -> bool:
    return encoding in LOSSY


def host_waits(encoding: str) -> bool:
    """On a GPU: the host stays close behind the device to learn whether the value fitted."""
    return encoding.partition(" ")[0] in _WAITING


def described(encoding: str) -> str:
    """For people: the word alone, and whether something is lost."""
    word = encoding.partition(" ")[0]
    return f"{word} (lossy)" if is_lossy(word) else word


@dataclass(frozen=True, slots=True)
class OffloadPoints:
    """Saved tensors by number. When `left_at` is packed, the copy to host memory is over; when
    `fetch_at` is unpacked, it is time to fetch the value."""

    left_at: int
    fetch_at: int

    def encoding(self) -> str:
        return f"{OFFLOAD} {self.left_at} {self.fetch_at}"

    @classmethod
    def of(cls, encoding: str | None) -> OffloadPoints | None:
        """None of other encodings, and of an offload without points."""
        word, *points = (encoding or "none").split()
        return cls(*map(int, points)) if word == OFFLOAD and points else None
