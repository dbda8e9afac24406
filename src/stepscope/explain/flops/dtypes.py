"""Names of dtypes, as users know them."""

from __future__ import annotations

from typing import Any

_PROFILER_NAMES = {
    "fp64": ("double",),
    "fp32": ("float",),
    "tf32": (),  # only names of kernels say so
    "fp16": ("c10::Half",),
    "bf16": ("c10::BFloat16",),
    "fp8": tuple(f"c10::Float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")),
    "fp4": ("c10::Float4_e2m1fn_x2",),
    "int64": ("long int", "long"),
    "int32": ("int",),
    "int16": ("short",),
    "int8": ("signed char", "unsigned char"),
    "bool": ("bool",),
    "complex64": ("c10::complex<float>",),
    "complex128": ("c10::complex<double>",),
}
DTYPES = tuple(_PROFILER_NAMES)
FP32, TF32, _INT64 = map(DTYPES.index, ("fp32", "tf32", "int64"))
_CODES_BY_PROFILER_NAME = {
    name: code for code, names in enumerate(_PROFILER_NAMES.values()) for name in names
}


def dtype_code(dtypes: Any) -> int:
    """The dtype of a call's first tensor, from the names the profiler writes; -1 if unknown.

    Indices come before data in some operators, so a floating-point tensor is preferred.
    """
    if not isinstance(dtypes, list):
        return -1
    known = [
        _CODES_BY_PROFILER_NAME[dtype]
        for dtype in dtypes
        if isinstance(dtype, str) and dtype in _CODES_BY_PROFILER_NAME
    ]
    floating = [code for code in known if code < _INT64]
    return (floating or known or [-1])[0]
