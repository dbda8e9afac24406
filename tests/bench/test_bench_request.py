"""What a bench is asked for: what exists, and the command that asks for the same again."""

from __future__ import annotations

import pytest

from stepscope.bench import catalogue
from stepscope.bench.request import BenchRequest, choose_tasks, parse_size
from stepscope.bench.task import BenchTask, check_task
from stepscope.bench.workload import Target, TrainingWorkload
from stepscope.errors import UsageError
from stepscope.ui.cli.bench import command


def workload(name: str, *tags: str) -> TrainingWorkload:
    return TrainingWorkload(
        name=name,
        task="nothing",
        source="made up",
        samples="rows",
        sizes={"tiny": {"batch": 4, "shape": (2, 3)}},
        targets={"tiny": Target(loss=1.0, steps=30)},
        build=lambda _config, _place: pytest.fail("nothing is trained here"),
        tags=frozenset(tags),
    )


@pytest.fixture
def two_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"plain": workload("plain"), "odd": workload("odd", "extra")}
    monkeypatch.setattr(catalogue, "names", lambda: (*known, "broken"))

    def load(name: str) -> TrainingWorkload:
        if name not in known:
            raise UsageError(f"workload {name} cannot be loaded")
        return known[name]

    monkeypatch.setattr(catalogue, "load", load)


@pytest.mark.usefixtures("two_workloads")
def test_the_suite_leaves_out_extras_and_goes_on_without_what_cannot_be_loaded() -> None:
    tasks, problems = choose_tasks(BenchRequest())
    assert [task.name for task in tasks] == ["plain"]
    assert problems == ("workload broken cannot be loaded",)


@pytest.mark.usefixtures("two_workloads")
def test_extras_run_by_name_or_with_all() -> None:
    assert [task.name for task in choose_tasks(BenchRequest(names=("odd",))).tasks] == ["odd"]
    both = choose_tasks(BenchRequest(everything=True)).tasks
    assert [task.name for task in both] == ["plain", "odd"]


@pytest.mark.usefixtures("two_workloads")
@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (BenchRequest(names=("broken",)), "cannot be loaded"),
        (BenchRequest(names=("plain",), size="paper"), "no size paper. It has tiny"),
        (BenchRequest(names=("plain",), changes={"batsh": "4"}), "did you mean batch"),
        (BenchRequest(names=("plain",), changes={"batch": "many"}), "such as 4"),
        (BenchRequest(names=("plain",), changes={"shape": "2"}), "cannot be changed"),
    ],
)
def test_what_was_named_and_does_not_exist_is_refused(request_: BenchRequest, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        choose_tasks(request_)


def test_an_unknown_size_gets_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean small"):
        parse_size("smal")


@pytest.mark.usefixtures("two_workloads")
def test_sets_of_remedies_stand_next_to_each_other() -> None:
    request = BenchRequest(names=("plain", "odd"), remedies=((), ("bf16",)))
    names = [task.name for task in choose_tasks(request).tasks]
    assert names == ["plain", "plain+bf16", "odd", "odd+bf16"]


def test_the_command_of_a_request_asks_for_the_same() -> None:
    request = BenchRequest(
        names=("gpt2",),
        size="small",
        everything=True,
        changes={"length": "8"},
        remedies=((), ("bf16", "fused-optimizer")),
        ranks=(1, 2),
        sweep=(4, 8),
        steps=40,
        runs=3,
    )
    params = command.make_context("bench", list(request.command[2:])).params
    assert request.command[:2] == ("stepscope", "bench")
    fields = (
        "names", "size", "everything", "changes", "remedies", "ranks", "sweep", "steps", "runs",
    )  # fmt: skip
    assert {name: params[name] for name in fields} == {
        name: getattr(request, name) for name in fields
    }


# --set refuses what no training can have, before anything runs.

WORKLOAD = TrainingWorkload(
    name="one",
    task="sums",
    source="this test",
    samples="rows",
    sizes={"tiny": {"batch": 8, "layers": 2, "lr": 0.1, "shift": -1.0, "kind": "gru"}},
    targets={"tiny": Target(loss=1.0, steps=60)},
    build=lambda _config, _place: lambda _number: None,  # type: ignore[arg-type, return-value]
)


def check(text: str) -> BenchTask:
    name, _, value = text.partition("=")
    return check_task(BenchTask(workload=WORKLOAD, size="tiny", changes={name: value}))


@pytest.mark.parametrize(
    "text", ["batch=0", "batch=-3", "batch=2.5", "layers=-1", "lr=nan", "lr=inf", "lr=-0.1"]
)
def test_impossible_values_are_refused_with_the_usual_one(text: str) -> None:
    with pytest.raises(UsageError, match=r"--set .*: one needs a value such as"):
        check(text)


@pytest.mark.parametrize("text", ["batch=1", "layers=0", "lr=0", "shift=-2", "kind=lstm"])
def test_what_a_training_can_have_is_taken(text: str) -> None:
    assert check(text).changes
