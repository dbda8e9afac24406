"""threads and one-thread, in scripts and shells that set too many or too few."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from injected import TRAINING, assert_patch_trains_the_same, patch_of, run_injected

from stepscope.errors import UsageError
from stepscope.fix.cores import share_of_cores
from stepscope.fix.named_changes import choose, choose_all, environment, load_change, with_changes
from stepscope.fix.proposal import Script
from stepscope.records.processors import allowed_cores
from stepscope.records.script_facts import Frame, ScriptFacts

if TYPE_CHECKING:
    from pathlib import Path

SHOWN = TRAINING + '    print("threads", torch.get_num_threads())\n'
SET_BY_SCRIPT = SHOWN.replace(
    "torch.manual_seed(0)", "torch.manual_seed(0)\ntorch.set_num_threads(5)"
)


def why(value: str, **facts: Any) -> str | None:
    known = {"cores": 8, "machine_cores": 8, "threads": 3} | facts
    return load_change("threads").fix.fits(ScriptFacts(**known), value)


def test_ranks_share_the_cores_unless_they_are_pinned() -> None:
    assert share_of_cores(8, 8, 1) == 8
    assert share_of_cores(8, 8, 3) == 2
    assert share_of_cores(2, 8, 4) == 2  # each is kept to two of its own
    assert share_of_cores(1, 1, 4) == 1


def test_which_number_of_threads_can_be_tried() -> None:
    assert why("cores") is None
    assert why("half") is None
    assert why("cores", threads=8) == "operators already use 8 threads"
    assert why("half", local_ranks=2, threads=2) == "operators already use 2 threads"
    assert "one-thread" in str(why("cores", cores=1, machine_cores=1))
    assert why("cores", device="cuda") == "the model is not on the CPU"
    one = load_change("one-thread").fix
    assert one.fits(ScriptFacts(threads=4), "") is None
    assert one.fits(ScriptFacts(threads=1), "") == "operators already use 1 thread"


def test_only_one_number_of_threads_at_a_time() -> None:
    assert choose("threads").value == "cores"
    with pytest.raises(UsageError, match="cannot be applied together"):
        choose_all(["threads=half", "one-thread"])
    with pytest.raises(UsageError, match="does not take the value 'some'"):
        choose("threads=some")


def test_a_variable_of_mkl_is_changed_where_the_user_has_set_it() -> None:
    users = {"MKL_NUM_THREADS": "64", "HOME": "/home/u"}
    changes = environment(choose_all(["one-thread"]), users)
    assert with_changes(users, changes) == {
        "MKL_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "HOME": "/home/u",
    }
    assert environment(choose_all(["threads=6"]), {}) == {"OMP_NUM_THREADS": "6"}
    assert environment(choose_all(["threads=half"]), {}) == {}


@pytest.mark.slow
def test_a_script_that_sets_threads_itself(tmp_path: Path) -> None:
    run = run_injected(tmp_path, SET_BY_SCRIPT, "one-thread")
    assert "1 thread per operator" in run.did["one-thread"]
    assert set(run.output.splitlines()) == {"threads 1"}
    plain = run_injected(tmp_path, SET_BY_SCRIPT)
    assert plain.facts.threads == 5
    assert load_change("one-thread").fix.fits(plain.facts, "") is None
    _, text = patch_of(plain, "one-thread")
    assert b"torch.set_num_threads(1)" in text


@pytest.mark.slow
def test_the_patch_of_a_scripts_own_call_trains_the_same(tmp_path: Path) -> None:
    source = assert_patch_trains_the_same(tmp_path, SET_BY_SCRIPT, "threads=2")
    assert "torch.set_num_threads(2)" in source


def test_a_library_that_sets_threads_is_named() -> None:
    """The user's line that leads there calls something else."""
    file = "/home/u/train.py"
    frame = Frame(file=file, line=1, function="<module>")
    facts = ScriptFacts(set_threads=(frame,), threads=4)
    proposal = load_change("one-thread").fix.patch(
        Script(facts, {file: b"trainer.fit(model)\n"}.get), ""
    )
    assert proposal.edits == ()
    assert proposal.by_hand == (f"call torch.set_num_threads(1) (see {file}:1)",)


@pytest.mark.slow
def test_a_shell_that_sets_too_many(tmp_path: Path) -> None:
    users = {"OMP_NUM_THREADS": "7"}
    plain = run_injected(tmp_path, SHOWN, variables=users)
    assert plain.facts.threads == 7
    assert plain.facts.variables["OMP_NUM_THREADS"] == "7"
    run = run_injected(tmp_path, SHOWN, "threads=cores", variables=users)
    assert set(run.output.splitlines()) == {f"threads {allowed_cores()}"}
    proposal, _ = patch_of(plain, "threads=cores")
    assert proposal.variables == {"OMP_NUM_THREADS": str(allowed_cores())}
    assert_patch_trains_the_same(tmp_path, SHOWN, "one-thread", variables=users)


@pytest.mark.slow
def test_variables_reach_the_workers_of_torchrun(tmp_path: Path) -> None:
    script = SHOWN.replace("import torch\n", "import os, torch\n", 1).replace(
        'print("threads",', 'print(os.environ["OMP_NUM_THREADS"],'
    )
    run = run_injected(tmp_path, script, "threads=2", ranks=2, variables={"OMP_NUM_THREADS": "1"})
    assert "2 2" in run.output.splitlines()
    assert run.facts.local_ranks == 2
