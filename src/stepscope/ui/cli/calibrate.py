"""stepscope calibrate: this machine's and its group of ranks' ceilings."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepscope.errors import NotCapturedError, StepscopeError, UsageError
from stepscope.measure.calibrate.settings import KINDS, Settings
from stepscope.ui.sizes import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Shown = Callable[[str, float], None]

_KEPT_LINES = 12  # of what a failing launcher said


def _size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    del ctx
    return None if value is None else parse_size(value, param.opts[0])


@click.command(name="calibrate", short_help="this machine's and its ranks' ceilings")
@click.option(
    "--ranks",
    type=click.IntRange(2),
    help="Start this many processes here with torchrun, to measure collectives.",
)
@click.option(
    "--backend",
    help="Communication backend: gloo, nccl, ... (default: nccl where there is CUDA, else gloo).",
)
@click.option(
    "--max-bytes",
    callback=_size,
    metavar="SIZE",
    help="Largest message to measure (default: 256MiB).",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1),
    help="Seconds for each collective in each group (default: 20, with --quick 1).",
)
@click.option(
    "--kind", "kinds", multiple=True, type=click.Choice(KINDS), help="Measure only this collective."
)
@click.option("--quick", is_flag=True, help="Fewer and smaller sizes, a few seconds in all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write an HTML page with the plots to this file.",
)
@click.option(
    "--compare",
    callback=_size,
    metavar="SIZE",
    help="Measure nothing: compare all-reduce algorithms for this message size.",
)
@click.option("--world", type=click.IntRange(2), help="Number of ranks for --compare.")
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
    world: int | None,
) -> None:
    """Measure what this machine can do at most: matmuls, copies, launches and, with ranks,
    collectives, each fitted as latency + bytes / rate. The profile is kept for this host.

    Alone, with --ranks N, or under a launcher: torchrun --nproc-per-node=8 -m stepscope calibrate

    With --compare SIZE nothing is measured: ring, tree and halving-doubling are compared on the
    saved profile's numbers.
    """
    if compare is not None:
        _compare(compare, world, as_json)
        return
    if world is not None:
        raise UsageError("--world is for --compare only; --ranks starts ranks")
    if max_bytes is not None and max_bytes < 1 << 12:
        raise UsageError("--max-bytes: a sweep starts at 1KiB and needs at least 4KiB")
    if find_spec("torch") is None:
        raise UsageError("calibrate measures with PyTorch: pip install torch")
    if html is not None and not html.absolute().parent.is_dir():
        raise UsageError(f"--html {html}: its folder does not exist")
    settings = Settings(
        backend=backend, max_bytes=max_bytes, seconds=seconds, quick=quick, kinds=kinds or KINDS
    )
    raw = _measure(settings, ranks, quiet=as_json)
    if raw is not None:
        _conclude(raw, html, as_json)


def _measure(settings: Settings, ranks: int | None, *, quiet: bool) -> dict[str, Any] | None:
    """None on every rank but the first."""
    from stepscope.ui.terminal.calibration import shown_shares

    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if launched and ranks is not None:
        raise UsageError("--ranks starts ranks itself: leave it out under a launcher")
    if settings.backend is not None and not launched and ranks is None:
        raise UsageError("--backend needs ranks: use --ranks N or a launcher")
    with shown_shares(quiet=quiet) as shown:
        if ranks is not None:
            return _start_ranks(settings, ranks, shown)
        return _measure_here(settings, shown)


def _measure_here(settings: Settings, shown: Shown) -> dict[str, Any] | None:
    rank = os.environ.get("RANK", "0")
    with _silent_stdout():
        from stepscope.measure.calibrate.job import measure

        try:
            return measure(settings, shown if rank == "0" else lambda *_: None)
        except StepscopeError:
            raise
        except (RuntimeError, ValueError, OSError) as error:
            whose = f"rank {rank}: " if "RANK" in os.environ else ""
            raise StepscopeError(f"{whose}measuring failed: {error}") from None


@contextlib.contextmanager
def _silent_stdout() -> Iterator[None]:
    """Some backends greet on stdout, which belongs to our answer."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _start_ranks(settings: Settings, ranks: int, shown: Shown) -> dict[str, Any]:
    cores = max(1, (os.cpu_count() or 1) // ranks)
    environment = {"OMP_NUM_THREADS": str(cores), **os.environ}
    with tempfile.TemporaryDirectory(prefix="stepscope-") as folder:
        answer = Path(folder) / "raw.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        ours = ["-m", "stepscope.measure.calibrate", "--progress", "--json", str(answer)]
        process = subprocess.Popen(
            [*launcher, f"--nproc-per-node={ranks}", *ours, *settings.arguments()],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        try:
            said = _follow(process, shown)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode or not answer.exists():
            raise _failure(answer, said)
        return _answer(answer)


def _follow(process: subprocess.Popen[str], shown: Shown) -> list[str]:
    """Show progress until the launcher ends; what else it said."""
    from stepscope.measure.calibrate.settings import PROGRESS

    said = []
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(PROGRESS):
            _, share, what = line.strip().split(" ", 2)
            shown(what, float(share))
        else:
            said.append(line.rstrip())
    process.wait()
    return said


def _answer(file: Path) -> dict[str, Any]:
    """What a rank wrote down for us."""
    from stepscope.trace.decode import NotJsonError, decode
    from stepscope.trace.regular_files import read_whole

    try:
        return decode(read_whole(file), dict[str, Any])
    except NotJsonError as error:
        raise StepscopeError(f"the ranks' answer {file} cannot be read: {error}") from None


def _failure(answer: Path, said: list[str]) -> StepscopeError:
    """What the failing ranks wrote down, else the launcher's last words."""
    told = [_answer(path) for path in sorted(answer.parent.glob("*.error-*"))]
    if not told:
        return StepscopeError("the ranks ended without an answer:", *said[-_KEPT_LINES:])
    message = "; ".join(dict.fromkeys(each["message"] for each in told))
    kinds = {UsageError.exit_code: UsageError}
    return kinds.get(told[0]["exit_code"], StepscopeError)(message)


def _conclude(raw: dict[str, Any], html: Path | None, as_json: bool) -> None:
    from stepscope.trace.profiles import save_profile
    from stepscope.ui.calibration import calibration_json, profile_of

    profile = profile_of(raw)
    saved = save_profile(profile)
    if html is not None:
        from stepscope.ui.html.calibration import write_calibration

        try:
            write_calibration(profile, html)
        except OSError as error:
            raise UsageError(f"--html {html} could not be written: {error.strerror}") from None
    if as_json:
        _write_json(calibration_json(profile, saved))
        return
    from stepscope.ui.terminal.calibration import print_calibration

    print_calibration(profile, saved=saved, report=html)


def _compare(size_bytes: int, world: int | None, as_json: bool) -> None:
    from stepscope.predict.algorithms import compare_algorithms, hop_of_ring
    from stepscope.trace.profiles import find_profile
    from stepscope.trace.user_folders import this_host

    profile = find_profile(collective="all_reduce", skip_broken=False)
    fit = profile.fit_for("all_reduce", profile.world_size) if profile else None
    if profile is None or fit is None:
        raise NotCapturedError(
            f"no saved profile of {this_host()} has an all_reduce: "
            "run stepscope calibrate --ranks 2 (or under torchrun) first"
        )
    hop = hop_of_ring(fit)
    comparison = compare_algorithms(
        size_bytes, world or profile.world_size, hop.alpha_ns, hop.beta_ns_per_byte
    )
    if as_json:
        from stepscope.ui.calibration import compare_json

        _write_json(compare_json(comparison, profile))
        return
    from stepscope.ui.terminal.calibration import print_comparison

    print_comparison(comparison, profile)


def _write_json(value: dict[str, Any]) -> None:
    from stepscope.ui.json_text import write_json

    write_json(value)
