"""The table of public scripts is told from what the runs left, and says what is missing."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

import field
import field_data
from field_scripts import Script, choose, read_scripts
from field_trial import Trial, _steps_of, try_script

TRAINING = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=STEP_SIZE)
for step in range(20):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().sum()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f}")
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with one repository of one script."""
    home = tmp_path / "scripts" / "owner" / "name"
    (home / "examples").mkdir(parents=True)
    (home / "examples" / "train.py").write_text(TRAINING)
    return tmp_path / "scripts"


def _script(**changes):
    row = {"name": "tiny", "repository": "owner/name", "path": "examples/train.py"}
    row |= {"command": "python train.py", "steps": 20}
    row |= {"edits": {"train.py": [["STEP_SIZE", "0.01"]]}}
    return Script(**{**row, **changes})


def _right_trial(**changes):
    facts = {"name": "tiny", "own_steps": 20, "counted_steps": (20,), "seen_steps": (20,)}
    facts |= {"bare_code": 0, "captured_code": 0, "same_losses": True, "traces": 1}
    return Trial(**{**facts, "verdict": "Healthy.", "bare_s": 1.0, "captured_s": 2.0, **changes})


def _written(tmp_path, text):
    path = tmp_path / "list.toml"
    path.write_text(text)
    return path


@pytest.mark.slow
def test_a_script_is_counted_by_itself_by_the_counter_and_by_stepscope(folder, tmp_path):
    trial = try_script(_script(steps=r"step (\d+) ", counted_from=0), folder, tmp_path / "work")
    assert trial.problem is None
    assert trial.own_steps == 20
    assert trial.counted_steps == (20,)
    assert trial.bare_step_ms > 0
    assert trial.seen_steps == (20,)
    assert (trial.bare_code, trial.captured_code, trial.same_losses) == (0, 0, True)
    assert trial.traces == 1
    assert trial.verdict
    assert trial.right
    assert (folder / "owner/name/examples/train.py").read_text() == TRAINING


def test_a_script_that_is_not_there_is_a_row_that_says_so(folder, tmp_path):
    trial = try_script(_script(path="examples/gone.py"), folder, tmp_path / "work")
    assert trial.problem == f"not there: {folder / 'owner/name/examples/gone.py'}"
    assert not trial.right
    assert field.line(trial).split(None, 1) == ["tiny", trial.problem]


def test_data_that_is_not_there_is_named(folder, tmp_path):
    trial = try_script(_script(data={"digits": "mnist"}), folder, tmp_path / "work")
    assert trial.problem == f"not there: {folder / 'data/mnist'}"


def test_an_edit_that_no_longer_fits_is_named(folder, tmp_path):
    script = _script(edits={"train.py": [["learning_rate", "0.01"]]})
    trial = try_script(script, folder, tmp_path / "work")
    assert trial.problem == "train.py has changed: it no longer says 'learning_rate'"


def test_a_script_that_fails_bare_is_not_held_against_stepscope(folder, tmp_path):
    script = _script(command="python -c \"raise OSError('no disk')\"", edits={})
    trial = try_script(script, folder, tmp_path / "work")
    assert trial.problem == "fails without stepscope: OSError: no disk"


@pytest.mark.parametrize(
    "changes",
    [
        {"seen_steps": (19,)},
        {"seen_steps": ()},
        {"traces": 0},
        {"captured_code": 1},
        {"same_losses": False},
        {"own_steps": None},
        {"ranks": 2},
        {"ranks": 2, "seen_steps": (20, 19), "traces": 2},
        {"problem": "captured, over 120 s"},
    ],
)
def test_one_contradiction_makes_a_row_wrong(changes):
    assert _right_trial().right
    assert not _right_trial(**changes).right


def test_a_script_of_one_step_is_right_without_a_trace():
    assert _right_trial(traces=0, traced=False).right


def test_losses_that_are_not_printed_are_not_different_ones():
    assert _right_trial(same_losses=None).right


def test_a_row_tells_the_counts_and_marks_what_is_wrong():
    trial = _right_trial(ranks=2, seen_steps=(20, 19), counted_steps=(20, 20), traces=1)
    words = field.line(trial).split()
    assert words[:8] == ["tiny", "19,20", "20", "20x2", "0/0", "same", "1/2", "1.0"]
    assert words[-2:] == ["WRONG:", "Healthy."]
    assert "WRONG" not in field.line(_right_trial())


def test_without_a_verdict_the_row_says_what_stepscope_said():
    trial = _right_trial(
        seen_steps=(), traces=0, verdict=None, messages=("stepscope: nothing seen",)
    )
    assert field.line(trial).endswith("WRONG: stepscope: nothing seen")


def test_scripts_that_could_not_be_tried_are_counted_apart():
    trials = [_right_trial(), _right_trial(traces=0), Trial(name="gone", problem="not there: x")]
    assert field.summary(trials) == "1 of 2 scripts right, 1 could not be tried"


@pytest.mark.parametrize(
    ("log", "steps"),
    [
        ("1000000 -1\n2000000 0\n3000000 -1\n6000000 0\n", (2, 4.0)),
        ("0 0\n0 1\n1000000 1\n", (2, 1.0)),  # two optimizers: the busier one
        ("0 -1\n0 -1\n5 0\n", (1, None)),  # accumulation: a step is the optimizer's
        ("0 -1\n2000000 -1\n", (2, 2.0)),  # no optimizer: backward passes
    ],
)
def test_calls_of_a_process_are_counted_as_steps(log, steps):
    assert _steps_of(log) == steps


def test_the_last_number_in_the_output_is_the_count():
    script = _script(steps=r"iter (\d+):", counted_from=0)
    assert script.own_steps("iter 0: a\niter 19: b\n") == 20
    assert script.own_steps("nothing") is None
    assert _script(steps=7).own_steps("iter 19:") == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = 3", "not a list of"),
        ("[[script]\n", "not a list of"),
        ('[[script]]\nname = "a"\ncolour = "red"', r"row 1 \(a\): unknown key colour"),
        ('[[script]]\nname = "a"', r"row 1 \(a\): .*missing"),
    ],
)
def test_a_mistake_in_the_list_names_file_and_row(tmp_path, text, message):
    with pytest.raises(SystemExit, match=message):
        read_scripts(_written(tmp_path, text))


def test_two_rows_of_one_name_are_refused(tmp_path):
    row = '[[script]]\nname="a"\nrepository="o/n"\npath="p"\ncommand="c"\nsteps=1\n'
    with pytest.raises(SystemExit, match="two rows are called a"):
        read_scripts(_written(tmp_path, row * 2))


def test_only_known_names_can_be_chosen():
    scripts = [_script(name="a"), _script(name="b")]
    assert [script.name for script in choose(scripts, ["b"])] == ["b"]
    assert choose(scripts, None) == scripts
    with pytest.raises(SystemExit, match="no script is called c; there are a, b"):
        choose(scripts, ["c"])


def test_the_projects_own_list_is_whole():
    scripts = read_scripts()
    assert len(scripts) >= 25
    assert sum(script.ranks > 1 for script in scripts) >= 8
    assert all(
        script.edits.keys() == {k for k, v in script.edits.items() if v} for script in scripts
    )


def test_a_folder_that_is_missing_ends_in_one_sentence(tmp_path):
    command = [sys.executable, field.__file__, str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert (
        done.stderr == f"{tmp_path / 'none'}: no such folder; it should hold clones as owner/name\n"
    )


def test_the_command_prints_the_table_writes_every_number_and_checks(tmp_path):
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    row = '[[script]]\nname="a"\nrepository="o/n"\npath="p"\ncommand="c"\nsteps=1\n'
    command = [sys.executable, field.__file__, str(scripts), "--check"]
    command += ["--list", str(_written(tmp_path, row)), "--json", str(tmp_path / "all.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"a{' ' * 26}not there: {scripts / 'o/n/p'}" in done.stdout
    (told,) = json.loads((tmp_path / "all.json").read_text())["scripts"]
    assert told.keys() == {f.name for f in dataclasses.fields(Trial)} | {"right"}
    assert told["right"] is False


def test_stand_in_data_has_the_real_sets_formats(tmp_path):
    field_data.write_digits(tmp_path, train=3, test=2)
    images = (tmp_path / "MNIST/raw/train-images-idx3-ubyte").read_bytes()
    assert images[:16].hex() == "00000803000000030000001c0000001c"
    assert len(images) == 16 + 3 * 28 * 28
    field_data.write_citations(tmp_path, papers=5, edges=4)
    rows = [line.split("\t") for line in Path(tmp_path / "cora.content").read_text().splitlines()]
    assert {len(row) for row in rows} == {1 + 1433 + 1}
    field_data.write_words(tmp_path, tokens=400)
    assert len((tmp_path / "train.txt").read_text().split()) == 20 * 19
