"""Readers of the tables in ../shared/gpu_transfer: kernel and step times that others measured."""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "gpu_transfer"
TWO_INPUTS = ("add", "mul", "div", "pow")
# The fp32 tables: one machine each.
FP32_GPUS = (
    "P4",
    "P100-PCIE-16GB",
    "V100-PCIE-32GB",
    "T4",
    "A100-PCIE-40GB",
    "A100-PCIE-80GB",
)
BF16_GPUS = ("A100-SXM4-80GB", "L40S", "B200", "RTX-PRO-6000")


class OpTimes(NamedTuple):
    """Times of one operator in one dtype: shape -> GPU -> milliseconds."""

    op: str
    dtype: str
    times: dict[tuple[int, ...], dict[str, float]]

    def on(self, gpu: str, least_ms: float = 0.0) -> tuple[Floats, Floats]:
        """Shapes and times of one GPU."""
        found = [
            (shape, times[gpu])
            for shape, times in self.times.items()
            if times.get(gpu, 0.0) > least_ms
        ]
        return np.array([shape for shape, _ in found], float), np.array([ms for _, ms in found])

    def on_both(self, source: str, target: str) -> tuple[Floats, Floats, Floats]:
        """Shapes that two GPUs ran, and both times."""
        found = [
            (shape, times[source], times[target])
            for shape, times in self.times.items()
            if source in times and target in times
        ]
        columns = zip(*found, strict=True) if found else ((), (), ())
        shapes, before, after = columns
        return np.array(shapes, float), np.array(before), np.array(after)

    @property
    def gpus(self) -> list[str]:
        return sorted({gpu for times in self.times.values() for gpu in times})


def rows(name: str) -> Iterator[dict[str, str]]:
    path = FOLDER / name
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        yield from csv.DictReader(file)


def _collect(name: str, dtype: str, columns: tuple[str, ...], op: str = "") -> dict[str, OpTimes]:
    tables: dict[str, dict[tuple[int, ...], dict[str, float]]] = defaultdict(dict)
    for row in rows(name):
        shape = tuple(int(row[column]) for column in columns)
        tables[row.get("op", op)].setdefault(shape, {})[row["gpu"]] = float(row["ms"])
    return {key: OpTimes(key, dtype, times) for key, times in tables.items()}


def matmul_fp32() -> dict[str, OpTimes]:
    return _collect("matmul_fp32.csv.gz", "fp32", ("batch", "m", "n", "k"))


def elementwise_fp32() -> dict[str, OpTimes]:
    return _collect("elementwise_fp32.csv.gz", "fp32", ("rows", "cols"))


def conv_fp32() -> OpTimes:
    columns = ("batch", "in_ch", "out_ch", "filter", "image", "stride", "padding")
    return _collect("conv_fp32.csv.gz", "fp32", columns, "conv")["conv"]


def attention_bf16() -> dict[str, OpTimes]:
    """By kernel: libraries differ more than shapes."""
    tables: dict[str, dict[tuple[int, ...], dict[str, float]]] = defaultdict(dict)
    for row in rows("attention_bf16.csv.gz"):
        shape = tuple(int(row[c]) for c in ("batch", "seq", "heads", "kv_heads", "head_dim"))
        kernel = "flash" if "flash_att" in row["kernel"] else row["kernel"]
        key = row["kernel"] if kernel == "flash" else kernel
        tables[key].setdefault(shape, {})[row["gpu"]] = float(row["ms"])
    return {key: OpTimes("attention", "bf16", times) for key, times in tables.items()}


def layers_fp16() -> dict[str, OpTimes]:
    return _collect("layers_fp16.csv.gz", "fp16", ("m", "n", "k"))


def wide_matmul(dtype: str) -> OpTimes:
    """bf16 and fp8 linear layers, one column per GPU."""
    times: dict[tuple[int, ...], dict[str, float]] = {}
    for row in rows(f"matmul_{dtype}.csv.gz"):
        shape = (1, int(row["m"]), int(row["n"]), int(row["k"]))
        times[shape] = {gpu: float(row[gpu]) for gpu in BF16_GPUS if row.get(gpu)}
    return OpTimes("linear", dtype, times)
