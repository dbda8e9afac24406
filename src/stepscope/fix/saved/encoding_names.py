"""The names of encodings, as plans write them: a word, then what it needs to know.

bits | two-valued | window 2,2/2,2/0,0/1,1/8,8 | sparse 0.51 | narrow uint8     hold a value
sign | shape | above 0 | within -1.0 1.0 | ...                                  for one consumer
bf16 | fp16 | fp8-e4m3 | fp8-e5m2 | 4-bit                                       lossy
offload                                                                         in host memory
"""

from __future__ import annotations

LOSSY = ("bf16", "fp16", "fp8-e4m3", "fp8-e5m2", "4-bit")
OFFLOAD = "offload"
FETCHED_AHEAD = 2  # offloaded values that are on their way back before they are read


def is_lossy(encoding: str) -> bool:
    return encoding in LOSSY


def described(encoding: str) -> str:
    """For people: the word alone, and whether something is lost."""
    word = encoding.partition(" ")[0]
    return f"{word} (lossy)" if is_lossy(word) else word
