"""Names of dtypes, as users know them."""

from __future__ import annotations

from typing import Any

DTYPES = (
    "fp64",
    "fp32",
    "tf32",
    "fp16",
    "bf16",
    "fp8",
    "fp4",
    "int64",
    "int32",
    "int16",
    "int8",
    "bool",
    "complex64",
    "complex128",
)
CODES = {name: code for code, name in enumerate(DTYPES)}
FP32, TF32 = CODES["fp32"], CODES["tf32"]
_NAMES = {
    "double": "fp64",
    "float": "fp32",
    "c10::Half": "fp16",
    "c10::BFloat16": "bf16",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e4m3fnuz": "fp8",
    "c10::Float8_e5m2": "fp8",
    "c10::Float8_e5m2fnuz": "fp8",
    "c10::Float4_e2m1fn_x2": "fp4",
    "long int": "int64",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "signed char": "int8",
    "unsigned char": "int8",
    "bool": "bool",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}
_CODES_BY_PROFILER_NAME = {profiler: CODES[name] for profiler, name in _NAMES.items()}


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
    floating = [code for code in known if code < CODES["int64"]]
    return (floating or known or [-1])[0]
