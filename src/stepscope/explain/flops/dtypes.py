"""Names of dtypes, as users say them."""

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
_CODE_OF = {profiler: CODES[name] for profiler, name in _NAMES.items()}


def dtype_code(dtypes: Any) -> int:
    """The first tensor's, of a call's dtypes as the profiler writes them; -1 where none is known.

    Indices come before data in some operators, so a floating-point tensor is preferred.
    """
    if not isinstance(dtypes, list):
        return -1
    known = [_CODE_OF[each] for each in dtypes if isinstance(each, str) and each in _CODE_OF]
    floating = [code for code in known if code < CODES["int64"]]
    return (floating or known or [-1])[0]
