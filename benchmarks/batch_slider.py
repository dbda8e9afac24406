"""The batch slider against the truth: predicted and measured samples per second and peak memory.

    python benchmarks/batch_slider.py [--rounds N] [SCRIPT ...]

Each script is profiled once, and the step at half, twice and four times its batch is promised from
that run. Then the number in its source is changed, as an editor would, and the changed scripts and
the unchanged one are profiled in turns. The middle of the rounds counts. A busy machine slows all
of them, so each trains with one thread, the time that it waits for a core is left out, and the
promised ratio to the present batch is compared with the ratio measured in turns. Also prints what
marking lines costs: a marked step over a plain one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from stepscope.records.source_lines import BatchPlace
from stepscope.trace.decode import Oddities
from stepscope.trace.run_folder.step_files import read_step_columns
from stepscope.ui.editor.batch_size import batch_curve, batch_in_source
from stepscope.ui.editor.line_costs import line_costs_of
from stepscope.ui.editor.profile_child import profile_script

SCRIPTS = Path(__file__).parents[1] / "tests" / "ui" / "editor" / "scripts"
FACTORS = (0.5, 2.0, 4.0)
LIMIT_S = 120.0
_MARKED = (8, 9)  # the steps whose lines are marked
_AFTER = 10  # from this step on nothing is recorded


class Measured(NamedTuple):
    step_ms: float
    peak_bytes: int | None
    marked_over_plain: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scripts", nargs="*", default=["mlp_loader.py", "encoder.py", "convnet.py"])
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    for name in options.scripts:
        with tempfile.TemporaryDirectory() as place:
            rows += compare(SCRIPTS / name, Path(place), options.rounds)
    within = sum(row["within"] for row in rows)
    right_peaks = sum(row["peak_within"] for row in rows)
    print(f"{within} of {len(rows)} steps within their bars, {right_peaks} of {len(rows)} peaks")


def text_with_batch(text: str, place: BatchPlace, batch: int) -> str:
    """Return the source with another batch size."""
    lines = text.split("\n")  # carriage returns stay where they are
    spots = [(place.line, place.column, place.end_column), *place.also]
    for number, column, end in sorted(spots, reverse=True):  # the last one first: columns shift
        line = lines[number - 1]
        lines[number - 1] = f"{line[:column]}{batch}{line[end:]}"
    return "\n".join(lines)


def compare(script: Path, place: Path, rounds: int) -> list[dict[str, object]]:
    """Promise first, then measure."""
    text = script.read_text()
    file = place / script.name
    file.write_text(text)
    run = profiled(file, place / "promise")
    costs = line_costs_of(run)
    spot = batch_in_source(text, costs)
    if spot is None:
        sys.exit(f"{script.name}: no number in the source is its batch size")
    batches = {factor: round(spot.value * factor) for factor in (1.0, *FACTORS)}
    promised = {one.batch: one for one in batch_curve(run, batches.values(), batch=spot.value)}
    texts = {batch: text_with_batch(text, spot, batch) for batch in batches.values()}
    seen: dict[int, list[Measured]] = {batch: [] for batch in texts}
    for number in range(rounds):
        for batch, changed in texts.items():
            file.write_text(changed)
            seen[batch].append(measure(profiled(file, place / f"{number}-{batch}")))
    now = promised[spot.value]
    base_ms = statistics.median(one.step_ms for one in seen[spot.value])
    marked = statistics.median(one.marked_over_plain for one in seen[spot.value])
    print(
        f"\n{script.name}: batch {spot.value}, {base_ms:.1f} ms; a marked step takes {marked:.2f}x"
    )
    rows = []
    for factor in FACTORS:
        point = promised[batches[factor]]
        step_ms = statistics.median(one.step_ms for one in seen[point.batch])
        ratio = step_ms / base_ms
        bars = point.low_ms / now.step_ms, point.step_ms / now.step_ms, point.high_ms / now.step_ms
        peak = seen[point.batch][0].peak_bytes
        row: dict[str, object] = {
            "script": script.name,
            "batch": point.batch,
            "promised": [round(bar, 3) for bar in bars],
            "measured": round(ratio, 3),
            "within": bars[0] <= ratio <= bars[2],
            "samples_per_second": [
                round(1e3 * point.batch / (one * base_ms)) for one in (bars[1], ratio)
            ],
            "peak_bytes": [point.peak_low_bytes, point.peak_bytes, point.peak_high_bytes, peak],
            "peak_within": peak is not None
            and point.peak_bytes is not None
            and abs(peak / point.peak_bytes - 1) < 0.05,
        }
        print(json.dumps(row))
        rows.append(row)
    return rows


def profiled(script: Path, folder: Path) -> Path:
    result = profile_script(script, [], limit_s=LIMIT_S, folder=folder)
    if result.run is None:
        sys.exit(f"{script.name}: {result.failed}\n" + "\n".join(result.output))
    return Path(result.run)


def measure(run: Path) -> Measured:
    costs = line_costs_of(run)
    steps = read_step_columns(run / "rank-00000", Oddities("steps"))
    assert steps is not None
    own_ns = steps.step_ns - (0 if steps.cpu_wait_ns is None else steps.cpu_wait_ns)
    plain = float(own_ns[steps.number >= _AFTER].mean())
    marked = float(own_ns[(steps.number >= min(_MARKED)) & (steps.number <= max(_MARKED))].mean())
    return Measured(plain / 1e6, costs.peak_bytes, marked / plain)


if __name__ == "__main__":
    main()
