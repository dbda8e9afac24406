"""Ray Train: workers captured by their runtime_env, a worker that dies, what `capture` gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from trainer_jobs import DDP, HERE, TORCHRUN, end, explain, losses, needs, notes, read_rank, start

import stepscope.ray
from stepscope.errors import UsageError
from stepscope.measure.settings import Settings
from stepscope.ui.jobs.environment import INJECT


@pytest.mark.launchers
@needs("ray")
@needs("pyarrow")  # Ray Train needs it
def test_workers_are_captured_and_one_that_dies_is_another_attempt(tmp_path: Path) -> None:
    out, printed = tmp_path / "run", tmp_path / "losses"
    printed.mkdir()
    script = str(HERE / "scripts" / "ray_training.py")
    bare = start((*TORCHRUN, "--standalone", "--nproc-per-node=2", DDP), tmp_path)
    variables = {"RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    end(start((sys.executable, script, str(out), str(printed)), tmp_path, variables))
    trained = losses(*((printed / str(rank)).read_text() for rank in (0, 1)))
    assert trained == losses(end(bare, code=None)[0])
    statuses = {path.name: read_rank(path)["status"] for path in out.glob("rank-*")}
    assert statuses.pop("rank-00001") == "running"  # it died
    assert set(statuses) == {"rank-00000", "rank-00000.2", "rank-00001.2"}
    assert statuses["rank-00000.2"] == statuses["rank-00001.2"] == "finished"
    run = json.loads((out / "run.json").read_text())
    assert (run["status"], run["exit_code"]) == ("finished", 0)
    explanation = explain(out)
    assert [(r["rank"], r["world_size"]) for r in explanation["ranks"]] == [(0, 2), (1, 2)]
    assert notes(explanation)["restarted"].endswith("attempt 2 is explained")


def test_the_runtime_env_holds_the_settings_and_keeps_the_users_own(tmp_path: Path) -> None:
    mine = {"pip": ["einops"], "env_vars": {"A": "1", "PYTHONPATH": "/mine"}}
    run = stepscope.ray.capture(tmp_path / "run", runtime_env=mine, active=5)
    variables = run.runtime_env["env_vars"]
    assert run.runtime_env["pip"] == ["einops"]
    assert (variables["A"], variables["PYTHONPATH"]) == ("1", f"{INJECT}{os.pathsep}/mine")
    settings = json.loads(variables["STEPSCOPE_CAPTURE"])
    assert (settings["folder"], settings["active"]) == (str(tmp_path / "run"), 5)
    assert mine["env_vars"] == {"A": "1", "PYTHONPATH": "/mine"}
    without = stepscope.ray.capture(tmp_path / "other").runtime_env["env_vars"]
    assert without["PYTHONPATH"] == f"{INJECT}{os.pathsep}${{PYTHONPATH}}"


def test_an_empty_entry_of_a_nodes_python_path_is_not_the_working_folder(tmp_path: Path) -> None:
    program = "import os, sys; sys.stdout.write(f'{os.getcwd() in sys.path}')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{INJECT}{os.pathsep}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False"


def test_the_folder_is_closed_once_with_the_end_of_the_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class PlantedError(Exception):
        pass

    with pytest.raises(PlantedError), stepscope.ray.capture(tmp_path / "run") as run:
        raise PlantedError
    run.finish()
    content = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (content["status"], content["exit_code"]) == ("finished", 1)
    assert capsys.readouterr().err.count("nothing was captured: no worker ended") == 1


def test_wrong_use_is_refused_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unexpected keyword argument 'activ'"):
        stepscope.ray.capture(tmp_path / "run", activ=5)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(UsageError, match="never overwritten"):
        stepscope.ray.capture(tmp_path / "mine")


def test_a_folder_that_cannot_be_made_leaves_the_users_runtime_env(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    run = stepscope.ray.capture(tmp_path / "file" / "run", runtime_env={"pip": ["a"]})
    assert (run.folder, run.runtime_env) == (None, {"pip": ["a"]})
    run.finish()
    assert "nothing is captured" in capsys.readouterr().err


def test_under_stepscope_run_the_outer_run_folder_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (variable,) = (Settings(folder=str(tmp_path / "outer")).to_environment()).items()
    monkeypatch.setenv(*variable)
    with stepscope.ray.capture(tmp_path / "inner") as run:
        assert run.folder == tmp_path / "outer"
        assert run.runtime_env["env_vars"]["STEPSCOPE_CAPTURE"] == variable[1]
    assert not (tmp_path / "inner").exists()
    assert not (tmp_path / "outer").exists()


def test_ray_is_not_imported() -> None:
    program = "import stepscope.ray, sys; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
