"""Fit the constants of predict/tensor_cores.py to rows of convolution_costs.py; print errors.

    python benchmarks/fit_convolutions.py [--rows convolutions.json] [--keep smaller.json] [--write]

Half of the random shapes are fitted; the other half and the shapes of well-known nets are the test.
Printed for both, and for what the shipped constants say: the median and the 90th percentile of the
error, and the share of times within 25%. `--keep` writes the rows as benchmarks/measured has them.
`--write` puts the factors into predict/data/kernels.json.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.optimize import nnls

from fitted_rows import write_values
from stepscope.predict.tensor_cores import (
    AskedGradients,
    Convolution,
    Terms,
    amounts,
    convolution_ns,
)
from stepscope.records.hardware import Ceilings, find_device

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Flags = NDArray[np.bool_]

MEASURED = Path(__file__).parent / "measured/convolutions_h200.json"
DTYPES = ("tf32", "bf16")
PASSES: dict[str, AskedGradients | None] = {"forward": None, "backward": AskedGradients()}
WELL_KNOWN = 47  # the first shapes: those of known_shapes() in convolution_costs.py
# Shorter times may be those of the host that launched the kernels.
LONG_NS = {"forward": 100_000.0, "backward": 200_000.0}
_ROUNDS, _CLOSE = 20, 0.03
_SHAPE = ("batch", "inputs", "outputs", "side", "kernel", "stride")
_WAYS = ("fp32", *DTYPES)


class MeasuredShape(NamedTuple):
    shape: Convolution
    times_ns: dict[str, dict[str, float]]  # by dtype and pass


class Errors(NamedTuple):
    rows: int
    median: float  # of the logarithm, without sign
    tenth: float  # its 90th percentile
    within_quarter: float
    bias: float  # median of measured over said, minus 1


def read_shapes(path: Path) -> tuple[str, list[MeasuredShape]]:
    """The device and its rows, as measured or as kept."""
    document = json.loads(path.read_text())
    rows = document["rows"]
    if isinstance(rows[0], dict):
        rows = _group(rows)
    return document["device"], [_read(row) for row in rows]


def _group(rows: list[dict[str, object]]) -> list[list[object]]:
    """One row per shape, with its times in microseconds in every dtype."""
    size = len(_WAYS)
    grouped = []
    for first in range(0, len(rows), size):
        of_shape = rows[first : first + size]
        assert tuple(row["way"] for row in of_shape) == _WAYS
        times = [round(float(str(row[name])) / 1e3, 1) for row in of_shape for name in PASSES]
        grouped.append([*(of_shape[0][name] for name in _SHAPE), *times])
    return grouped


def _read(row: list[object]) -> MeasuredShape:
    batch, inputs, outputs, side, kernel, stride, *times = row
    assert isinstance(kernel, list)
    values = [int(str(number)) for number in (batch, inputs, outputs, side, stride)]
    out_side = -(-values[3] // values[4])
    shape = Convolution(
        batch=values[0],
        inputs=values[1],
        outputs=values[2],
        read_points=values[3] ** 2,
        written_points=out_side**2,
        filtered_points=out_side**2,
        taps=math.prod(kernel),
        strided=values[4] > 1,
    )
    micros = iter(float(str(time)) for time in times)
    by_way = {way: {name: 1e3 * next(micros) for name in PASSES} for way in _WAYS}
    return MeasuredShape(shape, by_way)


def keep(path: Path, rows: Path) -> None:
    document = json.loads(rows.read_text())
    columns = [*_SHAPE, *(f"{way} {name} us" for way in _WAYS for name in PASSES)]
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in _group(document["rows"]))
    head = f'{{"device": {json.dumps(document["device"])}, "columns": {json.dumps(columns)}'
    path.write_text(f'{head}, "rows": [\n{lines}\n]}}\n')


def device_of(name: str) -> tuple[Ceilings, int]:
    """Of the data sheet: rates, and multiprocessors."""
    device = find_device(name)
    if device is None:
        raise SystemExit(f"{name} is not in the table of devices")
    ceilings = Ceilings(
        device=name,
        flops=device.peaks,
        bytes_s=device.bandwidth_bytes_s,
        flops_source=dict.fromkeys(device.peaks, "table"),
        bytes_source="table",
        source=device.source,
    )
    return ceilings, device.multiprocessors


def measured_ns(rows: list[MeasuredShape], dtype: str, name: str) -> Floats:
    return np.array([row.times_ns[dtype][name] for row in rows])


def shipped_ns(device: str, rows: list[MeasuredShape], dtype: str, name: str) -> Floats:
    ceilings, units = device_of(device)
    gradients = PASSES[name]
    return np.array([convolution_ns(row.shape, dtype, ceilings, units, gradients) for row in rows])


def fit(device: str, rows: list[MeasuredShape], dtype: str, name: str) -> Terms:
    """Factors that are not negative, with the least sum of relative errors, nearly."""
    ceilings, units = device_of(device)
    time = measured_ns(rows, dtype, name)
    table = np.array([amounts(row.shape, dtype, ceilings, units, PASSES[name]) for row in rows])
    weight = 1.0 / time
    factors = np.zeros(len(Terms._fields))
    for _ in range(_ROUNDS):
        factors, _ = nnls(table * weight[:, None], time * weight)
        said = table @ factors
        error = np.abs(said / time - 1.0) + np.abs(np.log(said / time))
        weight = 1.0 / time / np.sqrt(np.maximum(error, _CLOSE))
    return Terms(*(float(f"{factor:.3g}") for factor in factors))


def errors(said: Floats, measured: Floats) -> Errors:
    off = np.abs(np.log(said / measured))
    return Errors(
        rows=len(said),
        median=float(np.median(off)),
        tenth=float(np.quantile(off, 0.9)),
        within_quarter=float(np.mean(np.abs(said / measured - 1.0) <= 0.25)),
        bias=float(np.median(measured / said) - 1.0),
    )


def parts_of(rows: list[MeasuredShape], measured: Floats, name: str) -> dict[str, Flags]:
    number = np.arange(len(rows))
    known = number < WELL_KNOWN
    held_out = ~known & (number % 2 == 0)
    return {
        "fitted": ~known & ~held_out,
        "held out": held_out,
        "held out, long": held_out & (measured > LONG_NS[name]),
        "well known": known,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=MEASURED)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.keep:
        keep(options.keep, options.rows)
    device, rows = read_shapes(options.rows)
    fits: dict[str, list[dict[str, float]]] = {dtype: [] for dtype in DTYPES}
    for dtype in DTYPES:
        for name in PASSES:
            measured = measured_ns(rows, dtype, name)
            parts = parts_of(rows, measured, name)
            fitted = [
                row for row, is_fitted in zip(rows, parts["fitted"], strict=True) if is_fitted
            ]
            factors = fit(device, fitted, dtype, name)
            fits[dtype].append(factors._asdict())
            print(f"{dtype} {name}: {factors}")
            ceilings, units = device_of(device)
            table = [amounts(row.shape, dtype, ceilings, units, PASSES[name]) for row in rows]
            both = {
                "now": np.array(table) @ np.array(factors),
                "shipped": shipped_ns(device, rows, dtype, name),
            }
            for which, said in both.items():
                for part, mine in parts.items():
                    found = errors(said[mine], measured[mine])
                    print(
                        f"  {which:8} {part:15} {found.rows:4} median {found.median:.1%}, 90th "
                        f"percentile {found.tenth:.1%}, within 25% {found.within_quarter:.0%}, "
                        f"bias {found.bias:+.1%}"
                    )
    if options.write:
        write_values({"kernels.convolutions": fits})


if __name__ == "__main__":
    main()
