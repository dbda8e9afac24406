"""Whether this host's clock is kept by NTP or PTP, as the kernel says. Nothing is changed."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

_UNSYNCHRONISED = 0x0040  # STA_UNSYNC
_CLOCK_ERROR = 5  # TIME_ERROR
_PTP = Path("/sys/class/ptp")


class _Timex(ctypes.Structure):
    """struct timex of adjtimex(2), as glibc and musl have it on 64-bit Linux."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),  # µs
        ("esterror", ctypes.c_long),  # µs
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 32),
    )


def host_clock_facts() -> dict[str, Any]:
    """What is not known is None. Never raises."""
    facts: dict[str, Any] = {
        "host": os.uname().nodename,
        "synchronised": None,
        "estimated_error_ns": None,
        "maximum_error_ns": None,
        "ptp_devices": _ptp_devices(),
    }
    try:
        timex = _Timex(modes=0)  # 0: read only
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):  # no such library, no such call
        return facts
    if state >= 0:
        facts |= _kernel_facts(state, timex.status, timex.esterror, timex.maxerror)
    return facts


def _kernel_facts(state: int, status: int, estimated_us: int, maximum_us: int) -> dict[str, Any]:
    synchronised = state != _CLOCK_ERROR and not status & _UNSYNCHRONISED
    known = synchronised and estimated_us >= 0 and maximum_us >= 0
    return {
        "synchronised": synchronised,
        # Without a source the kernel's estimates are placeholders.
        "estimated_error_ns": estimated_us * 1000 if known else None,
        "maximum_error_ns": maximum_us * 1000 if known else None,
    }


def _ptp_devices() -> list[str]:
    try:
        return sorted(place.name for place in _PTP.iterdir())[:16]
    except OSError:
        return []
