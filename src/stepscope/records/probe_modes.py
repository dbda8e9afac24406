"""The precisions that operators are timed in, as the library names them.

A mode is a precision: "" (torch's defaults: tf32 in cuDNN only), "fp32" (no tf32 anywhere), "tf32",
or autocast to "bf16" or "fp16". It ends with "+benchmark" where cuDNN tries its algorithms.
"""

from __future__ import annotations

PRECISIONS = ("tf32", "bf16", "fp16")  # those that a user may ask for
_TRIES = "+benchmark"


def mode_of(precision: str, *, benchmark: bool) -> str:
    return precision + (_TRIES if benchmark else "")


def precision_of(mode: str) -> str:
    return mode.removesuffix(_TRIES)


def tries_algorithms(mode: str) -> bool:
    """Whether the script had torch.backends.cudnn.benchmark on."""
    return mode.endswith(_TRIES)


def uses_autocast(mode: str) -> bool:
    return precision_of(mode) in ("bf16", "fp16")
