"""Library use: steps said by the script, regions named."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import stepscope


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def rank_json(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "rank-00000/rank.json").read_text())
    return found


def test_watch_captures_the_steps_it_is_told_of_and_names_regions(tmp_path: Path) -> None:
    done = run(
        """
        import sys, torch, stepscope
        weight = torch.zeros(8, requires_grad=True)
        with stepscope.watch(sys.argv[1], wait=3, warmup=1, active=2) as run:
            for _ in range(12):
                with stepscope.region("mine"):
                    (weight - 1).square().sum().backward()
                run.step()
        print(run.folder)
        """,
        tmp_path / "run",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "run")
    rank = rank_json(tmp_path / "run")
    assert (rank["steps"], rank["problems"], rank["status"]) == (12, [], "finished")
    trace = stepscope.read_trace(tmp_path / "run/rank-00000/trace.json.gz")
    assert trace.strings.index("mine") in trace.host.name
    assert stepscope.explain_job(tmp_path / "run").ranks[0].step_ms.truth


def test_steps_can_be_forward_passes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())\n"
        "for _ in range(15):\n    model(torch.randn(2, 4)).sum().backward()\n"
    )
    command = [sys.executable, "-m", "stepscope", "run", "--out", str(tmp_path / "run")]
    options = ["--no-explain", "--nvtx", "--step-on", "forward", "--wait", "3"]
    done = subprocess.run(
        [*command, *options, "--", sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rank = rank_json(tmp_path / "run")
    assert (rank["steps"], rank["problems"]) == (15, [])


def test_passes_before_the_optimizer_exists_do_not_split_its_first_step(tmp_path: Path) -> None:
    """They seem to end steps; the optimizer that follows such a pass ends no second one."""
    done = run(
        """
        import sys, torch, stepscope
        model = torch.nn.Linear(4, 4)

        def one_pass():
            model.zero_grad()
            model(torch.ones(2, 4)).sum().backward()

        with stepscope.watch(sys.argv[1], step_on="auto", wait=100):
            one_pass()
            one_pass()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(5):
                one_pass()
                optimizer.step()
        """,
        tmp_path / "run",
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run/rank-00000/steps.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    trained = [step for step in steps if step["optimizer_ns"]]
    assert len(trained) == 4
    assert all(step["backward_ns"] for step in trained)
    assert [step.get("first", False) for step in trained] == [True, False, False, False]
