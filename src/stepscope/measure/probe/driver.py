"""The version of the GPU's driver, as traces have it."""

from __future__ import annotations

import ctypes


def driver_version(library: str = "libcuda.so.1") -> str:
    """The CUDA version that the driver runs, such as 13000: traces name the driver by it, and torch
    does not always tell it."""
    number = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    return "" if failed else str(number.value)
