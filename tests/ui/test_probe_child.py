"""Real processes: operators rebuilt and timed, and processes that crash."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from stepscope.errors import StepscopeError
from stepscope.ui.cli.library import command as library
from stepscope.ui.cli.probe import command as probe
from stepscope.ui.probe import ProbeChild

torch = pytest.importorskip("torch")

CRASHES = """
import json, os, sys
for line in sys.stdin:
    request = json.loads(line)
    if request.get("name") == "crash":
        os.abort()
    if request.get("name") == "leave":
        sys.exit(3)
    facts = {"kind": "cpu", "device": "", "host": "here", "pid": str(os.getpid())}
    print(json.dumps(facts), flush=True)
"""


def test_a_crash_is_an_answer_and_the_next_call_gets_a_new_process() -> None:
    with ProbeChild(command=(sys.executable, "-c", CRASHES)) as child:
        first = child.ask({"do": "time", "name": "fine"}, 30.0)["pid"]
        crashed = child.ask({"do": "time", "name": "crash"}, 30.0)
        assert crashed == {"error": "its process ended (signal SIGABRT)"}
        assert child.ask({"do": "time", "name": "leave"}, 30.0)["error"].endswith("(exit code 3)")
        assert child.ask({"do": "time", "name": "fine"}, 30.0)["pid"] != first
        assert child.crashes == 2


def test_the_process_loads_before_it_is_asked(tmp_path: Path) -> None:
    sign = tmp_path / "loading"
    command = (sys.executable, "-c", f"open({str(sign)!r}, 'w'); input()")
    with ProbeChild(command=command):
        ends = time.monotonic() + 30
        while not sign.exists() and time.monotonic() < ends:
            time.sleep(0.01)
        assert sign.exists()


def test_a_process_that_does_not_start_is_an_error() -> None:
    with (
        ProbeChild(command=(sys.executable, "-c", "raise SystemExit(1)")) as child,
        pytest.raises(StepscopeError, match="does not start"),
    ):
        child.device()


def record_tiny_step(file: Path) -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.ReLU(inplace=True),
        torch.nn.Flatten(),
        torch.nn.LayerNorm(144),
        torch.nn.Linear(144, 5),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.profiler.profile(record_shapes=True) as profiler:
        for _ in range(3):
            loss = torch.nn.functional.cross_entropy(
                model(torch.rand(2, 3, 8, 8)), torch.randint(0, 5, (2,))
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            profiler.step()
    profiler.export_chrome_trace(str(file))


def invoke(command: Any, *arguments: object) -> Any:
    done = CliRunner().invoke(command, [*map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.slow
def test_a_tiny_step_is_probed_and_its_times_are_carried_to_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_tiny_step(tmp_path / "trace.json")
    body = json.loads(invoke(probe, tmp_path / "trace.json", "--budget", "2s", "--json"))
    timed = {row["name"] for row in body["operators"] if row["probed_ms"]}
    assert {"aten::conv2d", "aten::linear", "aten::layer_norm", "aten::relu_"} <= timed
    assert all(row["why"].startswith("the budget") for row in body["unprobed"])
    invoke(library, "export", tmp_path / "times.json")
    monkeypatch.setenv("STEPSCOPE_LIBRARY", str(tmp_path / "other"))
    assert json.loads(invoke(library, "show", "--json"))["places"] == []
    invoke(library, "import", tmp_path / "times.json")
    (place,) = json.loads(invoke(library, "show", "--json"))["places"]
    assert place["software"] == f"torch {torch.__version__}"
    assert place["calls"] >= len(timed)
