"""Four workers and a parameter server of two shards: every consistency, promised and measured.

    python -m benchmarks.together --seconds 12 --out together.svg

Workers fit a small linear model; most of a step is sleep, so that few cores suffice. In the scene
"transient" one random worker takes three times as long at each step, in "persistent" it is always
worker 0. The strong run is measured first. `stepscope whatif` promises the others from it; then
they are measured. The learning rate of strong is that of the others times the workers, as it
applies their mean once. Time to a loss is when a run's loss is first as low as the strong run's was
after four fifths of its time.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import stepscope
from stepscope.explain.rank_without_steps import explain_together_folder
from stepscope.text.figures import percent, significant
from stepscope.ui.html.panes.together import draw_curves

if TYPE_CHECKING:
    from stepscope.records.parameter_server import TogetherSummary

WORKERS, SHARDS = 4, 2
CONSISTENCIES = ("strong", "bounded:1", "bounded:3", "eventual", "weak:8")
SCENES = ("transient", "persistent")
SLOWER = 3
FEATURES = 512
RATE = 0.005  # learning rate of one worker's gradient
TARGET_AT = 0.8  # of the strong run's time
SMOOTH = 5  # points of a loss curve that are averaged
COLOURS = ("#3567c9", "#0f8f83", "#d9631e", "#a3282b", "#7a4fb5")


class Measured(NamedTuple):
    consistency: str
    summary: TogetherSummary
    promised: Any  # ConsistencyPromise; None for the run that promises are made from
    to_loss_s: float | None


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as place:
        folder = options.runs or Path(place)
        pictures = []
        for scene in options.scenes:
            rows = measure_scene(scene, folder / scene, options)
            print_table(scene, rows)
            pictures.append((scene, rows))
    if options.out:
        options.out.write_text(draw(pictures))
        print(f"\nlosses: {options.out}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=12.0, help="of each run")
    parser.add_argument("--own-ms", type=float, default=40.0, help="of a step that is not slow")
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=SCENES)
    parser.add_argument("--consistencies", nargs="+", default=CONSISTENCIES[1:])
    parser.add_argument("--runs", type=Path, help="keep the run folders here; what is there counts")
    parser.add_argument("--out", type=Path, help="draw the losses into this SVG file")
    return parser.parse_args()


def measure_scene(scene: str, folder: Path, options: argparse.Namespace) -> list[Measured]:
    """The strong run first: the others are promised from it."""
    strong = folder / "strong"
    train_once(strong, "strong", scene, options)
    baseline = summary_of(strong)
    target = smooth_losses(baseline)[-1] if baseline.losses else None
    reached = [loss for s, loss in curve(baseline) if s >= TARGET_AT * baseline.span_s]
    target = reached[0] if reached else target
    rows = [Measured("strong", baseline, None, time_to(baseline, target))]
    for consistency in options.consistencies:
        promised = stepscope.whatif(strong, consistency=consistency).consistency
        run = folder / consistency.replace(":", "-")
        train_once(run, consistency, scene, options)
        summary = summary_of(run)
        rows.append(Measured(consistency, summary, promised, time_to(summary, target)))
    return rows


def summary_of(run: Path) -> TogetherSummary:
    summary = explain_together_folder(run)
    if summary is None:
        sys.exit(f"{run}: no worker finished a step")
    return summary


def train_once(run: Path, consistency: str, scene: str, options: argparse.Namespace) -> None:
    """Unless it was trained to its end before."""
    if run.is_dir():
        return
    begun = run.with_name(f"{run.name}.begun")
    shutil.rmtree(begun, ignore_errors=True)
    import ray
    import torch

    from stepscope.fix.server import ParameterServer

    if not ray.is_initialized():
        ray.init(num_cpus=WORKERS + SHARDS + 2, include_dashboard=False, log_to_driver=False)
    torch.manual_seed(0)
    model = torch.nn.Linear(FEATURES, 1)
    # A strong step applies the mean of all workers' gradients: once, so it may be so much longer.
    together = WORKERS if consistency == "strong" else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE * together)
    with ParameterServer(
        model,
        optimizer=optimizer,
        shards=SHARDS,
        consistency=consistency,
        workers=WORKERS,
        run=begun,
    ) as server:
        actor = ray.remote(num_cpus=0.5)(TrainingWorker)
        name = server.name
        workers = [actor.remote(name, worker) for worker in range(WORKERS)]
        ray.get([worker.ready.remote() for worker in workers])
        trained = [
            worker.train.remote(scene, options.own_ms / 1e3, options.seconds) for worker in workers
        ]
        ray.get(trained)
        for worker in workers:
            ray.kill(worker)
    begun.rename(run)


class TrainingWorker:
    """A Ray actor that fits the model to planted weights."""

    def __init__(self, server: str, rank: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.server, self.rank = server, rank
        self.model = torch.nn.Linear(FEATURES, 1)
        self.planted = torch.randn(FEATURES, generator=torch.Generator().manual_seed(1))
        self.random = torch.Generator().manual_seed(100 + rank)

    def ready(self) -> bool:
        return True

    def train(self, scene: str, own_s: float, seconds: float) -> int:
        """Until the time is over; returns the steps."""
        from stepscope.fix.server import ServerConnection

        slow = random.Random(7)
        steps, ends = 0, None
        with ServerConnection(self.server).worker(self.model, self.rank) as worker:
            while ends is None or time.monotonic() < ends:
                worker.pull()
                ends = ends or time.monotonic() + seconds  # the first pull waits for all workers
                slow_rank = slow.randrange(WORKERS) if scene == "transient" else 0
                time.sleep(own_s * (SLOWER if slow_rank == self.rank else 1))
                worker.push(steps, loss=self._backward())
                steps += 1
        return steps

    def _backward(self) -> float:
        import torch

        inputs = torch.randn(64, FEATURES, generator=self.random)
        targets = inputs @ self.planted / FEATURES**0.5
        loss = (self.model(inputs)[:, 0] - targets).square().mean()
        loss.backward()
        return float(loss.detach())


def curve(summary: TogetherSummary) -> list[tuple[float, float]]:
    return list(zip([point.s for point in summary.losses], smooth_losses(summary), strict=True))


def smooth_losses(summary: TogetherSummary) -> list[float]:
    """The mean of the last few points."""
    losses = [point.loss for point in summary.losses]
    last = [losses[max(0, end - SMOOTH) : end] for end in range(1, len(losses) + 1)]
    return [sum(few) / len(few) for few in last]


def time_to(summary: TogetherSummary, target: float | None) -> float | None:
    """When the loss is first as low as the target; None if it never is."""
    if target is None:
        return None
    return next((s for s, loss in curve(summary) if loss <= target), None)


def print_table(scene: str, rows: list[Measured]) -> None:
    print(
        f"\n{scene}: worker 0" if scene == "persistent" else f"\n{scene}: a random worker", end=""
    )
    print(f" takes {SLOWER} times as long")
    heads = ("consistency", "updates/s", "promised", "off", "behind", "blocked", "to loss", "")
    print("{:<12}{:>10}{:>10}{:>7}{:>8}{:>9}{:>9}  {}".format(*heads))
    for row in rows:
        summary, promised = row.summary, row.promised
        off = promised.updates_per_s / summary.updates_per_s - 1 if promised else None
        mean = summary.staleness.mean
        cells = (
            row.consistency,
            significant(summary.updates_per_s),
            significant(promised.updates_per_s) if promised else "-",
            "-" if off is None else percent(off),
            "-" if mean is None else significant(mean),
            percent(summary.blocked_share),
            "-" if row.to_loss_s is None else f"{significant(row.to_loss_s)} s",
            summary.verdict,
        )
        print("{:<12}{:>10}{:>10}{:>7}{:>8}{:>9}{:>9}  {}".format(*cells))
    for row in rows:
        print(f"  {row.consistency}: {row.summary.why}")


def draw(scenes: list[tuple[str, list[Measured]]]) -> str:
    """One picture: a row per scene, loss over time at the left and over updates at the right."""
    width, height = 560, 236
    parts = []
    for place, (scene, rows) in enumerate(scenes):
        by_time = {row.consistency: curve(row.summary) for row in rows if row.summary.losses}
        by_updates = {
            row.consistency: list(
                zip(
                    [float(point.updates) for point in row.summary.losses],
                    smooth_losses(row.summary),
                    strict=True,
                )
            )
            for row in rows
            if row.summary.losses
        }
        for column, (curves, name) in enumerate(((by_time, "seconds"), (by_updates, "updates"))):
            chart = str(draw_curves(curves, f"{name}, {scene} straggler"))
            at = f'x="{column * width}" y="{place * height}" width="{width}" height="{height}"'
            parts.append(chart.replace("<svg ", f"<svg {at} ", 1))
    size = f"0 0 {2 * width} {height * len(scenes)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}">{STYLE}{"".join(parts)}</svg>\n'
    )


STYLE = (
    "<style>text{font:12px sans-serif;fill:#5c6370}.level,.name{text-anchor:end}"
    ".is-middle{text-anchor:middle}.grid{stroke:#e4e7ec;fill:none}"
    ".frame{stroke:#b6bcc6;fill:none}.curve{stroke-width:1.6;fill:none}"
    + "".join(
        f".curve.is-{place}{{stroke:{colour}}}.name.is-{place}{{fill:{colour}}}"
        for place, colour in enumerate(COLOURS)
    )
    + "</style>"
)


if __name__ == "__main__":
    main()
