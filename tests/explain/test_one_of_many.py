"""one-of-many: an idle GPU in a run that belongs to a search."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import stepscope
from stepscope.records.explanation import Finding
from stepscope.trace.run_folder.related_runs import find_similar_runs

from .build import Events, kernel, step, write

IDLE = [(60.0 * i, 6.0) for i in range(40)]
BUSY = [(60.0 * i, 58.0) for i in range(40)]


def events(kernels: list[tuple[float, float]]) -> Events:
    made: Events = []
    for number in range(3):
        at = number * 2400.0
        made += step(number, start=at, dur=2400)
        for start, dur in kernels:
            made += kernel("k", start=at + start, dur=dur, launched_at=at + start - 1, launch_dur=1)
    return made


def run(
    folder: Path, name: str, *arguments: str, kernels: list[tuple[float, float]] = IDLE
) -> Path:
    rank = folder / name / "rank-00000"
    rank.mkdir(parents=True)
    command = ["python", "train.py", *arguments]
    (rank.parent / "run.json").write_text(json.dumps({"schema": 1, "command": command}))
    (rank / "rank.json").write_text("{}")
    write(rank / "trace.json", events(kernels), device="NVIDIA H200")
    return rank.parent


def finding(folder: Path) -> Finding | None:
    found = [one for one in stepscope.explain(folder).findings if one.id == "one-of-many"]
    return found[0] if found else None


def test_runs_of_the_same_script_with_other_arguments(tmp_path: Path) -> None:
    paths = [run(tmp_path, f"run-{rate}", "--lr", rate) for rate in ("0.1", "0.2", "0.3")]
    found = finding(paths[0])
    assert found is not None
    assert "2 more runs of train.py with other arguments" in found.summary
    assert found.severity == "high"
    remedies = {remedy.id: remedy for remedy in found.remedies}
    assert set(remedies) == {"fuse", "cuda-graphs"}
    assert remedies["fuse"].predicted_ms


def test_arguments_of_a_search_are_a_hint_without_a_promise(tmp_path: Path) -> None:
    found = finding(run(tmp_path, "only", "--seed=3", "--lr", "0.1"))
    assert found is not None
    assert "Its options are those of a search: --seed." in found.summary
    assert (found.severity, found.remedies) == ("low", ())


def test_one_run_repeated_or_another_script_is_no_search(tmp_path: Path) -> None:
    one = run(tmp_path, "one", "--lr", "0.1")
    run(tmp_path, "again", "--lr", "0.1")
    other = run(tmp_path, "other", "--lr", "0.2")
    (other / "run.json").write_text('{"schema": 1, "command": ["python", "evaluate.py", "-v"]}')
    assert finding(one) is None


def test_runs_that_differ_in_words_are_a_comparison_and_no_search(tmp_path: Path) -> None:
    one = run(tmp_path, "one", "--model", "unet", "--out", "runs/one")
    run(tmp_path, "other", "--model", "bert", "--out", "runs/other")
    run(tmp_path, "again", "--model", "unet", "--out", "runs/again")
    assert finding(one) is None


def test_numbers_in_names_count_and_places_do_not(tmp_path: Path) -> None:
    runs = [
        run(tmp_path, name, "--name", name, "lr=1e-3", "--out", f"runs/{letter}")
        for name, letter in (("exp1", "a"), ("exp2", "b"))
    ]
    found = finding(runs[0])
    assert found is not None
    assert "1 more run of train.py" in found.summary


def test_another_number_of_weights_is_another_model(tmp_path: Path) -> None:
    layers = {number: run(tmp_path, f"run-{number}", "--layers", number) for number in "248"}
    for number, weights in (("2", 1000), ("4", 2000)):
        memory = {"schema": 1, "categories": {"parameters": weights}}
        (layers[number] / "rank-00000" / "memory.json").write_text(json.dumps(memory))
    similar = find_similar_runs(layers["2"] / "rank-00000")
    assert similar is not None
    assert similar.count == 1  # of the third nothing is known


def test_a_busy_device_has_no_room(tmp_path: Path) -> None:
    paths = [run(tmp_path, f"run-{rate}", "--lr", rate, kernels=BUSY) for rate in ("0.1", "0.2")]
    assert finding(paths[0]) is None


@pytest.mark.parametrize("content", ["", "[]", '{"command": 3}', '{"command": ["python"]}', "\0"])
def test_damaged_runs_beside_it_are_left_out(tmp_path: Path, content: str) -> None:
    one = run(tmp_path, "one", "--trial", "1")
    other = run(tmp_path, "other", "--trial", "2")
    (other / "run.json").write_text(content)
    similar = find_similar_runs(one / "rank-00000")
    assert similar is not None
    assert (similar.count, similar.options) == (0, ("--trial",))
    assert find_similar_runs(other / "rank-00000") is None
