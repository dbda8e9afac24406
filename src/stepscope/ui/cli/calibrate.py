"""stepscope calibrate: measure this machine's matmuls, copies and collectives."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepscope.errors import NotCapturedError, StepscopeError, UsageError
from stepscope.measure.calibrate.settings import KINDS, CalibrationSettings
from stepscope.records.collective_schedules import COLLECTIVES
from stepscope.ui.cli.options import (
    SIZE,
    count_option,
    flag,
    html_option,
    json_option,
    long_name,
    time_between,
    verb,
)
from stepscope.ui.jobs.environment import own_ranks
from stepscope.ui.json_text import write_json
from stepscope.ui.user_input import parse_size, require_folder, writing

if TYPE_CHECKING:
    from stepscope.ui.progress import ShowShare

_LAST_LINES = 12  # of a failing launcher's output
_LABORATORY_RANKS = 4  # with fewer, most algorithms are the same
_MOST_BYTES = 4 << 30  # of a vector in the laboratory


def _parse_sizes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...]:
    del ctx
    option = long_name(param)
    sizes = tuple(parse_size(text, option) for text in value.split(",")) if value else ()
    for size in sizes:
        if not 4 <= size <= _MOST_BYTES:
            raise UsageError(f"{option} {value!r}: sizes are 4 bytes to 4GiB")
    if len(set(sizes)) == 1:
        raise UsageError(f"{option} {value!r}: name at least two sizes")
    return sizes


@verb(
    "calibrate",
    examples=(
        ("stepscope calibrate", "Measure matmuls, copies and launches of one device"),
        ("stepscope calibrate --ranks 8", "Also measure collectives, with eight processes"),
        (
            "torchrun --nproc-per-node 8 -m stepscope calibrate",
            "The same, under a launcher of your own",
        ),
    ),
    groups={
        "What to measure": "--ranks --backend --kind --max-bytes",
        "How long": "--seconds --quick",
        "Algorithms of collectives": "--algorithms --sizes --compare --world",
        "Output": "--json --html",
    },
)
@count_option(
    "--ranks", "Start this many processes with torchrun, to measure collectives.", least=2
)
@click.option(
    "--backend",
    metavar="NAME",
    help="Communication backend, such as gloo or nccl (default: nccl with CUDA, otherwise gloo).",
)
@click.option("--max-bytes", type=SIZE, help="Largest message to measure (default: 256MiB).")
@click.option(
    "--seconds",
    type=time_between(0.1),
    help="Time for each collective in each group (default: 20s, with --quick 1s).",
)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice(KINDS),
    metavar="NAME",
    help="Measure only this collective, such as all_reduce. Repeatable.",
)
@flag("--quick", "Measure fewer and smaller sizes, in a few seconds.")
@json_option
@html_option("Write a page with the plots. It needs no network.")
@click.option(
    "--compare",
    type=SIZE,
    help="Measure nothing. Compare all-reduce algorithms for this message size instead.",
)
@flag(
    "--algorithms",
    "Measure algorithms of collectives, such as ring and tree, against their formulas.",
)
@click.option(
    "--sizes",
    callback=_parse_sizes,
    metavar="SIZE,SIZE,...",
    help="Sizes for --algorithms (default: powers of four, 1KiB to 16MiB).",
)
@count_option("--world", "Ranks that --compare assumes (default: those measured).", least=2)
def command(
    ranks: int | None,
    backend: str | None,
    max_bytes: int | None,
    seconds: float | None,
    kinds: tuple[str, ...],
    quick: bool,
    as_json: bool,
    html: Path | None,
    compare: int | None,
    algorithms: bool,
    sizes: tuple[int, ...],
    world: int | None,
) -> None:
    """Measure how fast this machine is: matmuls, copies, launches and collectives.

    Each is fitted as latency + bytes / rate. The profile is saved for this host. Collectives need
    several ranks.

    --compare SIZE compares ring, tree and halving-doubling from the saved profile.

    --algorithms measures seven algorithms of all-reduce, all-gather and reduce-scatter, beside
    their formulas and the backend. It starts 4 ranks unless --ranks names another number.
    """
    _check_together(compare, algorithms, sizes, kinds)
    if compare is not None:
        _compare(compare, world, as_json)
        return
    if world is not None:
        raise UsageError("--world needs --compare; --ranks starts ranks")
    if max_bytes is not None and max_bytes < 1 << 12:
        raise UsageError("--max-bytes: it needs at least 4KiB")
    if find_spec("torch") is None:
        raise UsageError("calibrate measures with PyTorch: pip install torch")
    require_folder(html, "--html")
    settings = CalibrationSettings(
        backend=backend,
        max_bytes=max_bytes,
        seconds=seconds,
        quick=quick,
        kinds=kinds or KINDS,
        algorithms=algorithms,
        sizes_bytes=sizes,
    )
    if algorithms and ranks is None and not _is_launched():
        import torch

        # A rank for each GPU where there are several, else four ranks on gloo.
        gpus = torch.cuda.device_count() if settings.backend != "gloo" else 0
        ranks = gpus if gpus > 1 else _LABORATORY_RANKS
        if gpus <= 1:
            settings = replace(settings, backend=settings.backend or "gloo")
    raw = _measure(settings, ranks, quiet=as_json)
    if raw is not None:
        (_conclude_laboratory if algorithms else _conclude)(raw, html, as_json)


def _check_together(
    compare: int | None, algorithms: bool, sizes: tuple[int, ...], kinds: tuple[str, ...]
) -> None:
    """Raise UsageError for options that contradict each other."""
    if algorithms and compare is not None:
        raise UsageError("--algorithms measures, --compare measures nothing: choose one")
    if sizes and not algorithms:
        raise UsageError("--sizes needs --algorithms; --max-bytes limits the other measurements")
    others = [kind for kind in kinds if kind not in COLLECTIVES]
    if algorithms and others:
        raise UsageError(
            f"--algorithms has no {', '.join(others)}: choose from {', '.join(COLLECTIVES)}"
        )


def _is_launched() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _measure(
    settings: CalibrationSettings, ranks: int | None, *, quiet: bool
) -> dict[str, Any] | None:
    """Return what was measured; None on every rank but the first."""
    from stepscope.ui.progress import shown_shares

    launched = _is_launched()
    if launched and ranks is not None:
        raise UsageError("--ranks starts ranks itself: leave it out under a launcher")
    if settings.backend is not None and not launched and ranks is None:
        raise UsageError("--backend needs ranks: use --ranks N or a launcher")
    with shown_shares(quiet=quiet) as show:
        if ranks is not None:
            return _start_ranks(settings, ranks, show)
        rank = os.environ.get("RANK", "0")
        with _silent_stdout():
            from stepscope.measure.calibrate.job import measure

            try:
                return measure(settings, show if rank == "0" else lambda *_: None)
            except StepscopeError:
                raise
            except (RuntimeError, ValueError, OSError) as error:
                whose = f"rank {rank}: " if "RANK" in os.environ else ""
                raise StepscopeError(f"{whose}measuring failed: {error}") from None


@contextlib.contextmanager
def _silent_stdout() -> Iterator[None]:
    """Silence backends that print to stdout, which is for our answer alone."""
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _start_ranks(settings: CalibrationSettings, ranks: int, show: ShowShare) -> dict[str, Any]:
    cores = max(1, (os.cpu_count() or 1) // ranks)
    environment = {"OMP_NUM_THREADS": str(cores), **os.environ}
    with tempfile.TemporaryDirectory(prefix="stepscope-") as folder:
        answer = Path(folder) / "raw.json"
        ours = ("stepscope.measure.calibrate", "--progress", "--json", str(answer))
        process = subprocess.Popen(
            own_ranks(ranks, *ours, *settings.arguments()),
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        try:
            output = _follow(process, show)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode or not answer.exists():
            raise _failure(answer, output)
        return _read_answer(answer)


def _follow(process: subprocess.Popen[str], show: ShowShare) -> list[str]:
    """Show progress until the launcher ends; returns the other lines it printed."""
    from stepscope.measure.calibrate.settings import PROGRESS

    output = []
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(PROGRESS):
            _, share, what = line.strip().split(" ", 2)
            show(what, float(share))
        else:
            output.append(line.rstrip())
    process.wait()
    return output


def _read_answer(file: Path) -> dict[str, Any]:
    from stepscope.trace.decode import NotJsonError, decode
    from stepscope.trace.files import read_whole

    try:
        return decode(read_whole(file), dict[str, Any])
    except NotJsonError as error:
        raise StepscopeError(f"the ranks' answer {file} cannot be read: {error}") from None


def _failure(answer: Path, output: list[str]) -> StepscopeError:
    """Return the errors that ranks wrote, else the launcher's last lines."""
    errors = [_read_answer(path) for path in sorted(answer.parent.glob("*.error-*"))]
    if not errors:
        return StepscopeError("the ranks ended without an answer:", *output[-_LAST_LINES:])
    message = "; ".join(dict.fromkeys(error["message"] for error in errors))
    kinds = {UsageError.exit_code: UsageError}
    return kinds.get(errors[0]["exit_code"], StepscopeError)(message)


def _conclude(raw: dict[str, Any], html: Path | None, as_json: bool) -> None:
    from stepscope.trace.machine_profiles import save_profile
    from stepscope.ui.topics.measurements import calibration_json, fit_profile

    profile = fit_profile(raw)
    saved = save_profile(profile)
    if html is not None:
        from stepscope.ui.html.calibration import write_calibration

        with writing(html, "--html"):
            write_calibration(profile, html)
    if as_json:
        write_json(calibration_json(profile, saved))
        return
    from stepscope.ui.terminal.measurements import print_calibration

    print_calibration(profile, saved=saved, report=html)


def _conclude_laboratory(raw: dict[str, Any], html: Path | None, as_json: bool) -> None:
    from stepscope.predict.collective_laboratory import analyse

    report = analyse(raw)
    if html is not None:
        from stepscope.ui.html.calibration import write_laboratory

        with writing(html, "--html"):
            write_laboratory(report, html)
    if as_json:
        from stepscope.ui.topics.measurements import laboratory_json

        write_json(laboratory_json(report))
        return
    from stepscope.ui.terminal.measurements import print_laboratory

    print_laboratory(report, page=html)


def _compare(size_bytes: int, world: int | None, as_json: bool) -> None:
    from stepscope.predict.collective_times import compare_algorithms, hop_of_line
    from stepscope.records.folders import node_name
    from stepscope.trace.machine_profiles import find_profile

    profile = find_profile(collective="all_reduce", skip_broken=False)
    fit = profile.fit_for("all_reduce", profile.world_size) if profile else None
    if profile is None or fit is None:
        raise NotCapturedError(
            f"no saved profile of {node_name()} has an all_reduce: "
            "run stepscope calibrate --ranks 2 (or under torchrun) first"
        )
    hop = hop_of_line(fit.segments, fit.group_size)
    comparison = compare_algorithms(
        size_bytes, world or profile.world_size, hop.alpha_ns, hop.beta_ns_per_byte
    )
    if as_json:
        from stepscope.ui.topics.measurements import algorithms_json

        write_json(algorithms_json(comparison, profile))
        return
    from stepscope.ui.terminal.measurements import print_comparison

    print_comparison(comparison, profile)
