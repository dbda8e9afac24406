"""The dtypes of tensors: their bytes, and the names that torch, its tools and users give them."""

from typing import NamedTuple


class Dtype(NamedTuple):
    name: str  # torch's
    item_bytes: int
    peak: str = ""  # as users and tables of peaks name its rate: bf16, int8 for unsigned too
    profiler: tuple[str, ...] = ()  # in traces; the usual name first
    scalar_type: str = ""  # in C++, as the flight recorder writes it
    number: int = -1  # of the scalar type, as plain arguments carry it
    graph: str = ""  # in a printed graph


# fmt: off
# The order is that of the codes in columns of dtypes: floating-point ones come first.
TABLE = (
    Dtype("float64", 8, "fp64", ("double",), "Double", 7, "f64"),
    Dtype("float32", 4, "fp32", ("float",), "Float", 6, "f32"),
    Dtype("tf32", 4, "tf32"),  # no tensor has it: only kernels' names say so
    Dtype("float16", 2, "fp16", ("c10::Half",), "Half", 5, "f16"),
    Dtype("bfloat16", 2, "bf16", ("c10::BFloat16",), "BFloat16", 15, "bf16"),
    Dtype("float8_e4m3fn", 1, "fp8", ("c10::Float8_e4m3fn",), "Float8_e4m3fn", 24, "f8e4m3fn"),
    Dtype("float8_e4m3fnuz", 1, "fp8", ("c10::Float8_e4m3fnuz",),
          "Float8_e4m3fnuz", 26, "f8e4m3fnuz"),
    Dtype("float8_e5m2", 1, "fp8", ("c10::Float8_e5m2",), "Float8_e5m2", 23, "f8e5m2"),
    Dtype("float8_e5m2fnuz", 1, "fp8", ("c10::Float8_e5m2fnuz",),
          "Float8_e5m2fnuz", 25, "f8e5m2fnuz"),
    Dtype("float8_e8m0fnu", 1, "", ("c10::Float8_e8m0fnu",), "Float8_e8m0fnu", 44, "f8e8m0fnu"),
    Dtype("float4_e2m1fn_x2", 1, "fp4", ("c10::Float4_e2m1fn_x2",), "Float4_e2m1fn_x2", 45),
    Dtype("int64", 8, "int64", ("long int", "long", "long long"), "Long", 4, "i64"),
    Dtype("int32", 4, "int32", ("int",), "Int", 3, "i32"),
    Dtype("int16", 2, "int16", ("short",), "Short", 2, "i16"),
    Dtype("int8", 1, "int8", ("signed char",), "Char", 1, "i8"),
    Dtype("uint8", 1, "int8", ("unsigned char",), "Byte", 0, "u8"),
    Dtype("bool", 1, "bool", ("bool",), "Bool", 11, "b8"),
    Dtype("complex64", 8, "complex64", ("c10::complex<float>",), "ComplexFloat", 9, "c64"),
    Dtype("complex128", 16, "complex128", ("c10::complex<double>",), "ComplexDouble", 10, "c128"),
    Dtype("complex32", 4, "", ("c10::complex<c10::Half>",), "ComplexHalf", 8, "c32"),
    Dtype("uint16", 2, "", ("unsigned short",), "UInt16", 27, "u16"),
    Dtype("uint32", 4, "", ("unsigned int",), "UInt32", 28, "u32"),
    Dtype("uint64", 8, "", ("unsigned long",), "UInt64", 29, "u64"),
    Dtype("qint8", 1, "", ("c10::qint8",), "QInt8", 12),
    Dtype("quint8", 1, "", ("c10::quint8",), "QUInt8", 13),
    Dtype("qint32", 4, "", ("c10::qint32",), "QInt32", 14),
)
# fmt: on
BY_NAME = {dtype.name: dtype for dtype in TABLE}
NAME_BYTES = {dtype.name: dtype.item_bytes for dtype in TABLE}
BY_PROFILER_NAME = {name: dtype for dtype in TABLE for name in dtype.profiler}
PROFILER_BYTES = {name: dtype.item_bytes for name, dtype in BY_PROFILER_NAME.items()}
BY_SCALAR_TYPE = {dtype.scalar_type: dtype for dtype in TABLE if dtype.scalar_type}
BY_NUMBER = {dtype.number: dtype for dtype in TABLE if dtype.number >= 0}
BY_GRAPH_NAME = {dtype.graph: dtype for dtype in TABLE if dtype.graph}
# Names of rates; a code in a column of dtypes is an index of it.
PEAKS = tuple(dict.fromkeys(dtype.peak for dtype in TABLE if dtype.peak))
PEAK_BYTES = {dtype.peak: dtype.item_bytes for dtype in TABLE if dtype.peak}
# A profiler's name or a scalar type, in lower case as records of collectives mix them.
LOWER_CASE_BYTES = {
    name.lower(): dtype.item_bytes
    for dtype in TABLE
    for name in (dtype.name, dtype.scalar_type, *dtype.profiler)
    if name
}
