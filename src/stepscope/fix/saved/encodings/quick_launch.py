"""Launches Triton kernels without having Triton look at every argument each time.

That takes the host 20 microseconds and more, hundreds of times in a step. What Triton would look at
is noted here, and the variant that it chose for the same before is launched at once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch

_ALIGNED = 16  # what Triton asks of addresses and numbers


@dataclass(slots=True)
class _Variants:
    """Of all kernels, as compiled; `usable` until a launch fails that Triton itself can do."""

    known: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    usable: bool = True


@functools.cache
def _variants() -> _Variants:
    return _Variants()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """As `kernel[grid](*args, **options)`. `args` are tensors and numbers, all that the kernel
    takes before its constants; `options` are these, and the compiler's."""
    variants = _variants()
    if not variants.usable or not args[0].is_cuda:
        kernel[grid](*args, **options)
        return
    key = (kernel, torch._C._cuda_getDevice(), *map(_kind, args), *options.values())
    compiled = variants.known.get(key)
    if compiled is None:
        variants.known[key] = kernel[grid](*args, **options)
        return
    constants = [options[name] for name in kernel.arg_names[len(args) :]]
    try:
        compiled[(*grid, 1, 1)[:3]](*args, *constants)
    except Exception:  # another version of Triton
        variants.usable = False
        kernel[grid](*args, **options)


def _kind(argument: Any) -> Any:
    """At least as fine as the kinds that Triton tells apart."""
    if type(argument) is int:
        bits = argument.bit_length()
        return argument % _ALIGNED == 0, argument == 1, bits > 31, bits > 63
    if type(argument) is float:
        return float
    return argument.dtype, argument.data_ptr() % _ALIGNED == 0
