"""Lists of counts, as options have them: 1,2,4."""

from __future__ import annotations

from stepscope.errors import UsageError

_MOST = 1 << 20


def parse_counts(text: str, wrong: str) -> tuple[int, ...]:
    """In rising order, each once; UsageError with `wrong` for anything else than whole numbers."""
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UsageError(wrong) from None
    if counts[0] < 1 or counts[-1] > _MOST:
        raise UsageError(wrong)
    return tuple(counts)
