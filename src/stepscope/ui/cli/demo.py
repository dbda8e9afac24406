"""stepscope demo: train a small model here, in two processes, and explain it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import click

from stepscope.errors import StepscopeError, UsageError

WORLD = 2
_TIMEOUT_S = 300


@click.command(name="demo", short_help="train a small model here, in two processes, and explain it")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for traces and report (a new stepscope-demo* folder here by default).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(out: Path | None, as_json: bool) -> None:
    """Two CPU processes, one with a slow input, profiled and explained. No GPU, no network."""
    if find_spec("torch") is None:
        raise UsageError("demo trains a model and needs PyTorch: pip install torch")
    folder = _new_folder(out)
    _train(folder, quiet=as_json)
    from stepscope.ui.cli.explain import explain_paths

    report = folder / "report.html"
    explanation = explain_paths((folder,), cache=False, html=report, quiet=as_json)
    if as_json:
        import msgspec

        from stepscope.ui.contract import explanation_json

        sys.stdout.write(msgspec.json.encode(explanation_json(explanation)).decode() + "\n")
        return
    from stepscope.ui.terminal.explanation import print_explanation

    print_explanation(explanation, top=6, report=report)


def _new_folder(out: Path | None) -> Path:
    """Never over an existing one."""
    if out is not None:
        if out.exists() and any(out.iterdir()):
            raise UsageError(f"{out} is not empty: name a new folder")
        out.mkdir(parents=True, exist_ok=True)
        return out
    for number in range(1, 10_000):
        folder = Path("stepscope-demo" if number == 1 else f"stepscope-demo-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise UsageError("too many stepscope-demo folders here: remove some or use --out")


def _train(folder: Path, *, quiet: bool) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        logs = [Path(scratch) / f"rank{rank}.log" for rank in range(WORLD)]
        processes = [
            _start(rank, folder, Path(scratch) / "store", logs[rank], quiet=quiet)
            for rank in range(WORLD)
        ]
        try:
            codes = [process.wait(timeout=_TIMEOUT_S) for process in processes]
        except subprocess.TimeoutExpired:
            raise StepscopeError(f"the demo's training took over {_TIMEOUT_S} s") from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for rank, code in enumerate(codes):
            if code:
                last = "\n".join(logs[rank].read_text(errors="replace").splitlines()[-6:])
                raise StepscopeError(f"the demo's rank {rank} ended with code {code}:\n{last}")


def _start(
    rank: int, folder: Path, store: Path, log: Path, *, quiet: bool
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "stepscope.bench.demo", "--rank", str(rank)]
    command += ["--world", str(WORLD), "--store", str(store), "--out", str(folder)]
    with log.open("wb") as errors:
        output = sys.stderr.buffer if rank == 0 and not quiet else errors
        return subprocess.Popen(command, stdout=output, stderr=errors)
