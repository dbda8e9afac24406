"""Numbers as people read them: the one place that turns a figure into text.

Three significant digits, in the unit that suits. `ui/html/format.js` keeps the same rules on the
page; tests/records/figures.json holds cases that both must pass.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_DURATIONS = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_BINARY = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_RATES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_WHOLE = ("ns", "B")  # nobody measures a part of one
_MANY_TIMES = 3.0  # nobody can picture 2826% more
_LONG = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))


def significant(value: float) -> str:
    """Three significant digits, never an exponent: 0.0123, 1.23, 12.3, 123, 1,235."""
    size = abs(value)
    if size >= 999.5 or size == 0:
        return f"{value:,.0f}"
    decimals = 2
    # From here on, that many decimals would show a fourth digit: 9.995 is 10.0, 99.95 is 100.
    while decimals and size >= (10.0 ** (3 - decimals) - 0.5 * 10.0**-decimals):
        decimals -= 1
    while decimals < 6 and size < 0.9995 * 10 ** (2 - decimals):
        decimals += 1
    return f"{value:.{decimals}f}"


def signed(value: float) -> str:
    """+1.23, -45.6."""
    return f"+{significant(value)}" if value > 0 else significant(value)


def milliseconds(ms: float) -> str:
    """Times that are compared with each other stay in one unit."""
    return f"{significant(ms)} ms"


def duration(ns: float) -> str:
    """1.23 s, 45.6 ms, 789 µs, 12 ns."""
    return _scaled(ns, _DURATIONS)


def long_duration(ns: float) -> str:
    """Write two minutes and more as people say it: 45.6 s, 12 min 5 s, 3 h 20 min, 2 d 4 h."""
    if ns < 119.5e9:
        return duration(ns)
    return next(filter(None, (_in_two_units(ns / 1e9, *units) for units in _LONG)))


def _in_two_units(seconds: float, whole: int, name: str, part: int, part_name: str) -> str:
    """Empty below one of the larger unit."""
    many, rest = divmod(int(seconds / part + 0.5), whole // part)
    if not many:
        return ""
    return f"{many:,} {name} {rest} {part_name}" if rest else f"{many:,} {name}"


def size(size_bytes: float) -> str:
    """A GB is 1e9 bytes."""
    return _scaled(size_bytes, _SIZES)


def binary_size(size_bytes: float) -> str:
    """Write sizes that are powers of two: 64 KiB, 256 MiB."""
    unit = next((unit for unit in _BINARY if size_bytes >= unit[0]), None)
    return f"{size_bytes / unit[0]:.3g} {unit[1]}" if unit else size(size_bytes)


def rate(per_second: float, unit: str) -> str:
    """12.3 TFLOP/s, 456 GB/s."""
    return _scaled(per_second, [(scale, f"{prefix}{unit}") for scale, prefix in _RATES])


def flop_rate(per_second: float) -> str:
    """12.3 TFLOP/s."""
    return rate(per_second, "FLOP/s")


def byte_rate(per_second: float) -> str:
    """456 GB/s."""
    return rate(per_second, "B/s")


def flops(count: float) -> str:
    """7.89 TFLOP."""
    return rate(count, "FLOP")


def percent(share: float) -> str:
    """36%, 4.2%, <0.1%, 0%: a share of the step needs no more."""
    value = 100 * share
    if 0 < abs(value) < 0.05:
        return "<0.1%" if value > 0 else "0%"
    return f"{value:.{1 if value and abs(value) < 9.95 else 0}f}%"


def signed_percent(change: float) -> str:
    """A change keeps the digits that an interval needs: -36%, +12.3%, +4.2%, +0.43%."""
    value = 100 * change
    if abs(value) < 0.005:
        return "0%"
    return f"{value:+.{0 if abs(value) >= 20 else 1 if abs(value) >= 2 else 2}f}%"


def unsigned_percent(change: float) -> str:
    """Return how large a change is, in the same digits: 36%, 4.2%, 0.43%."""
    return signed_percent(abs(change)).lstrip("+")


def relative_change(change: float) -> str:
    """-36%, +12.3%; from three times as much on, how many times: 28 times."""
    return f"{factor(1 + change)} times" if change >= _MANY_TIMES - 1 else signed_percent(change)


def relative_interval(low: float, high: float) -> str:
    """Both ends alike: -4.2% to +12.3%; 1.8 to 470 times."""
    if high >= _MANY_TIMES - 1:
        return f"{factor(1 + low)} to {factor(1 + high)} times"
    return f"{signed_percent(low)} to {signed_percent(high)}"


def change_marks(shares: Sequence[float]) -> list[str]:
    """Changes on one scale, all in percent or all in times: -4.2%, 0, +12.3%; 1x, 1.8x, 470x."""
    if max(shares) >= _MANY_TIMES - 1:
        return [f"{factor(1 + share)}x" if share else "1x" for share in shares]
    return [signed_percent(share) if share else "0" for share in shares]


def longer_or_shorter(change: float, longer: str = "longer", shorter: str = "shorter") -> str:
    """Return what a change does to a time: 36% longer, 4.2% shorter, 28 times as long."""
    if change >= _MANY_TIMES - 1:
        return f"{factor(1 + change)} times as long"
    return f"{unsigned_percent(change)} {longer if change > 0 else shorter}"


def difference(share: float) -> str:
    """Return how far apart two numbers are, however little: 2.1%, 0.15%, 1.2e-7."""
    if abs(share) >= 0.0005 or not share:
        return unsigned_percent(share)
    digits, exponent = f"{abs(share):.1e}".split("e")
    return f"{digits}e{int(exponent)}"


def factor(times: float) -> str:
    """Return how many times: 1.15, 2.4, 12. Two digits that count, and two decimals near one."""
    return f"{times:,.{0 if times >= 9.95 else 1 if times >= 1.15 else 2}f}"


def interval(low: float, high: float) -> str:
    """Both ends: 30.1 to 33.5."""
    return f"{significant(low)} to {significant(high)}"


def mean_count(count: float) -> str:
    """Return how often, on average: 6, 1,200, 1.33."""
    return f"{count:,.0f}" if float(count).is_integer() else significant(count)


def trimmed(text: str) -> str:
    """Round values as such: 10 MB, not 10.0 MB; 2%, not 2.0%."""
    return re.sub(r"\.0+(?=[ %])", "", text)


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Write it in the largest unit of which it is at least one, after rounding: 999.9 ns is 1.00
    µs."""
    size = abs(value)
    scale, unit = next(((one, name) for one, name in units if size >= 0.9995 * one), units[-1])
    text = f"{value / scale:,.0f}" if unit in _WHOLE else significant(value / scale)
    return f"{text} {unit}"
