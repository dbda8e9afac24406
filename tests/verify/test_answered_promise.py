"""Which promise a comparison answers, from traces of made steps: 20 ms before, 16.4 ms after."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from folders import noisy, write_run
from msgspec.structs import replace
from promises import promise
from traced import write_trace

from stepscope.errors import UsageError
from stepscope.records.comparison import Comparison
from stepscope.records.prediction import Promise
from stepscope.verify.answered_predictions import with_promise
from stepscope.verify.compare import compare
from stepscope.verify.track_record import adjust, history, open_promises, remember

BF16 = "c10::BFloat16"
Capture = Callable[..., Path]


@pytest.fixture
def capture(tmp_path: Path) -> Capture:
    """A run folder of a made step; facts of rank.json may be given."""
    count = iter(range(1000))

    def make(
        ms: float = 20.0, facts: dict[str, Any] | None = None, traced: bool = True, **step: Any
    ) -> Path:
        number = next(count)
        known = {"host": "here"} | (facts or {})
        folder = write_run(tmp_path / f"run-{number}", noisy(ms, seed=number), **known)
        if traced:
            write_trace(folder / "rank-00000", **step)
        return folder

    return make


def compared(a: Path, b: Path) -> Comparison:
    return compare([str(a)], [str(b)], cache=False)


def promised(a: Path, name: str = "precision=bf16", **changes: Any) -> Promise:
    """As `whatif` makes one from A's run folder."""
    workload = compared(a, a).workload
    assert workload.signature is not None
    return remember(promise(name, **({"workload": workload, "path": str(a)} | changes)))


def reason(found: Comparison) -> str:
    """Why the one promise about A stays open."""
    assert found.promise is None
    (waiting,) = found.open_promises
    return waiting.why


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("precision=bf16", {"dtype": BF16}),
        ("precision=fp16", {"dtype": "c10::Half"}),
        ("optimizer=fused", {"optimizer": "fused"}),
        ("optimizer=foreach", {"optimizer": "foreach"}),
        ("batch=x2", {"batch": 16}),
        ("batch=16", {"batch": 16}),
        ("batch=x0.5", {"batch": 4}),
        ("accumulate=4", {"passes": 4}),
        ("checkpoint=blocks", {"again": 2}),
        ("compile", {"compiled": True}),
        ("precision=bf16 optimizer=fused", {"dtype": BF16, "optimizer": "fused"}),
    ],
)
def test_the_promised_change_alone_answers_its_promise(
    capture: Capture, name: str, step: dict[str, Any]
) -> None:
    a, b = capture(), capture(16.4, **step)
    promised(a, name)
    found = with_promise(compared(a, b))
    assert found.open_promises == ()
    assert found.promise is not None
    assert found.promise.error == pytest.approx(16.4 / 16 - 1, abs=0.01)
    assert found.promise.delivery is not None
    assert found.promise.delivery.seen
    assert not found.promise.delivery.named
    assert open_promises() == ()
    assert history() == (found.promise,)


@pytest.mark.parametrize(
    ("name", "step", "why"),
    [
        ("precision=bf16", {}, "its precision is the same as in A"),
        ("precision=bf16", {"dtype": "c10::Half"}, "precision fp32 -> fp16"),
        ("precision=bf16", {"optimizer": "fused"}, "its precision is the same as in A"),
        ("precision=bf16", {"dtype": BF16, "optimizer": "fused"}, "in other ways too: optimizer"),
        ("precision=bf16", {"dtype": BF16, "batch": 16}, "in other ways too: batch 8 -> 16"),
        ("precision=bf16", {"dtype": BF16, "again": 2}, "in other ways too: matmuls per step"),
        ("precision=bf16", {"dtype": BF16, "width": 32}, "other work than A: parameters"),
        ("batch=x2", {"batch": 24}, "B does not show batch=x2: batch 8 -> 24"),
        ("batch=x2", {"width": 32}, "other work than A: parameters"),
        ("accumulate=2", {"passes": 4}, "micro-batches 1 -> 4"),
        ("optimizer=fused", {"optimizer": "plain"}, "its optimizer is the same as in A"),
        ("precision=bf16 optimizer=fused", {"dtype": BF16}, "its optimizer is the same as in A"),
        ("bandwidth=2", {}, "stepscope captures nothing that shows"),
        ("remove=addcdiv", {"optimizer": "plain"}, "stepscope captures nothing that shows"),
        ("threads=1", {}, "stepscope captures nothing that shows"),
    ],
)
def test_anything_else_leaves_the_promise_open_and_says_why(
    capture: Capture, name: str, step: dict[str, Any], why: str
) -> None:
    a, b = capture(), capture(16.4, **step)
    promised(a, name)
    assert why in reason(with_promise(compared(a, b)))
    assert len(open_promises()) == 1


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"torch": "2.14"}, "torch 2.13 -> 2.14"),
        ({"host": "elsewhere"}, "host here -> elsewhere"),
        ({"argv": ["other.py"]}, "script train.py -> other.py"),
        ({"device": "NVIDIA H200"}, None),  # A's is not known: nothing to compare with
        ({"host_load": {"threads": 2}}, "threads 1 -> 2"),
    ],
)
def test_other_facts_of_b_leave_it_open(
    capture: Capture, facts: dict[str, Any], why: str | None
) -> None:
    a = capture(facts={"host_load": {"threads": 1}})
    b = capture(16.4, {"host_load": {"threads": 1}} | facts, dtype=BF16)
    promised(a)
    found = with_promise(compared(a, b))
    if why is None:
        assert found.promise is not None
    else:
        assert why in reason(found)


def applied(*names: str) -> dict[str, Any]:
    return {"remedies": [{"id": name, "did": ["x"], "refused": None} for name in names]}


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("precision=bf16", "bf16"),
        ("precision=tf32", "tf32"),
        ("threads=1", "one-thread"),
        ("threads=4", "threads=4"),
        ("bucket-mb=50", "bucket-mb=50"),
        ("compile", "compile=reduce-overhead"),
    ],
)
def test_a_run_with_the_promised_remedy_answers_the_promise(
    capture: Capture, name: str, remedy: str
) -> None:
    """Even where nothing in the trace shows the change."""
    a, b = capture(), capture(16.4, applied(remedy))
    promised(a, name)
    found = with_promise(compared(a, b))
    assert found.open_promises == ()
    assert found.promise is not None
    assert found.promise.delivery is not None
    assert found.promise.delivery.seen == (f"B was run with {remedy}",)
    assert [each.words for each in found.b.remedies] == [remedy]


@pytest.mark.parametrize(
    ("of_a", "of_b", "why"),
    [
        ((), ("bf16", "fused-optimizer"), "in other ways too: remedies none -> bf16, fused"),
        ((), ("bucket-mb=5",), "B does not show precision=bf16"),
        (("fused-optimizer",), ("bf16",), "in other ways too: remedies fused-optimizer -> bf16"),
        (("bf16",), ("bf16",), "B does not show precision=bf16"),
    ],
)
def test_other_remedies_than_the_promised_one_leave_it_open(
    capture: Capture, of_a: tuple[str, ...], of_b: tuple[str, ...], why: str
) -> None:
    a, b = capture(facts=applied(*of_a)), capture(16.4, applied(*of_b))
    promised(a)
    assert why in reason(with_promise(compared(a, b)))


def test_a_remedy_that_was_refused_shows_nothing(capture: Capture) -> None:
    refused = {"remedies": [{"id": "bf16", "did": [], "refused": "it needs a CUDA device"}]}
    a, b = capture(), capture(16.4, refused)
    promised(a)
    found = with_promise(compared(a, b))
    assert "its precision is the same as in A" in reason(found)
    assert [each.outcome for each in found.b.remedies] == ["refused"]


def test_a_what_if_shows_in_a_fact_of_its_own_name(capture: Capture) -> None:
    a, b = (capture(ms, {"host_load": {"threads": n}}) for ms, n in ((20.0, 4), (16.4, 1)))
    promised(a, "threads=1")
    answered = with_promise(compared(a, b)).promise
    assert answered is not None
    assert answered.delivery is not None
    assert answered.delivery.seen == ("threads 4 -> 1",)


def test_workers_of_the_loader_show_in_its_settings(capture: Capture) -> None:
    def fed_by(workers: int) -> dict[str, object]:
        evaluated = {"workers": 8, "trains": False, "batches": 90}
        return {"data": {"loaders": [evaluated, {**evaluated, "workers": workers, "trains": True}]}}

    a, b = (capture(ms, fed_by(workers)) for ms, workers in ((20.0, 2), (16.4, 0)))
    promised(a, "loader-workers=0")
    answered = with_promise(compared(a, b)).promise
    assert answered is not None
    assert answered.delivery is not None
    assert answered.delivery.seen == ("loader-workers 2 -> 0",)


@pytest.mark.parametrize(
    "changes",
    [
        {"baseline_ms": 26.0},
        {"host": "elsewhere"},
        {"workload": {"script": "other.py"}},
        {"workload": {"world_size": 8}},
        {"workload": {"signature": "0123456789abcdef"}},
        {"workload": {"signature": None}},
        {"workload": {"device": "NVIDIA H200", "script": None, "signature": None}},
    ],
)
def test_promises_about_something_else_stay_open(capture: Capture, changes: dict[str, Any]) -> None:
    a, b = capture(), capture(16.4, dtype=BF16)
    work = compared(a, a).workload
    if "workload" in changes:
        changes = {"workload": replace(work, **changes["workload"])}
    promised(a, **changes)
    found = with_promise(compared(a, b))
    assert found.promise is None
    assert [promise.delivery for promise in history(every_host=True)] == [None]


def test_in_turns_a_may_be_further_from_the_promises_own_run(capture: Capture) -> None:
    a, b = [capture(), capture()], [capture(16.4, dtype=BF16) for _ in range(2)]
    promised(a[0], baseline_ms=30.0)
    apart = compare([*map(str, a)], [*map(str, b)], cache=False)
    assert "the prediction is about 30.0 ms" in reason(with_promise(apart))
    paired = compare([*map(str, a)], [*map(str, b)], cache=False, paired=True)
    assert with_promise(paired).promise is not None


def test_a_step_that_is_hardly_known_answers_nothing(capture: Capture) -> None:
    a, b = capture(), capture(16.4, dtype=BF16)
    promised(a)
    found = compared(a, b)
    assert found.median is not None
    found = replace(found, median=replace(found.median, low=-0.7, high=1.2))
    assert "only known to lie between -70% and +120%" in reason(with_promise(found))


def test_a_change_that_was_made_and_did_nothing_is_an_answer(capture: Capture) -> None:
    a, b = capture(), capture(20.0, dtype=BF16)
    promised(a)
    found = with_promise(compared(a, b))
    assert found.verdict == "no difference seen"
    assert found.promise is not None
    assert found.promise.inside is False


def test_evidence_chooses_among_several_promises(capture: Capture) -> None:
    a, b = capture(), capture(16.4, optimizer="fused")
    promised(a, "precision=bf16", id="one")
    promised(a, "optimizer=fused", id="two")
    promised(a, "optimizer=fused", id="three", when_unix=3.0, predicted_ms=16.5)
    answered = with_promise(compared(a, b)).promise
    assert answered is not None
    assert answered.promise.id == "three"  # the newest
    assert {each.id for each in open_promises()} == {"one", "two"}


# The user's word


def test_a_name_stands_for_what_cannot_be_seen(capture: Capture) -> None:
    a, b = capture(traced=False), capture(16.4, traced=False)
    remember(promise("precision=bf16", id="abcd1234"))
    assert "--prediction abcd1234 records its result" in reason(with_promise(compared(a, b)))
    answered = with_promise(compared(a, b), "abcd").promise
    assert answered is not None
    assert answered.delivery is not None
    assert answered.delivery.named
    again = with_promise(compared(a, b), "abcd1234").promise  # the newest delivery counts
    assert again is not None
    assert history()[0].delivery == again.delivery


def test_a_name_lets_b_be_another_file(capture: Capture) -> None:
    a, b = capture(), capture(16.4, {"argv": ["fused.py"]}, optimizer="fused")
    made = promised(a, "optimizer=fused")
    assert "script train.py -> fused.py. If B is that change" in reason(
        with_promise(compared(a, b))
    )
    assert with_promise(compared(a, b), made.id).promise is not None


@pytest.mark.parametrize(
    ("step", "why"),
    [
        ({}, "B does not show"),
        ({"optimizer": "fused", "width": 32}, "B does other work than A"),
        ({"optimizer": "fused", "batch": 16}, "in other ways too: batch"),
    ],
)
def test_a_name_does_not_stand_against_what_is_seen(
    capture: Capture, step: dict[str, Any], why: str
) -> None:
    a, b = capture(), capture(16.4, **step)
    made = promised(a, "optimizer=fused")
    assert why in reason(with_promise(compared(a, b), made.id))
    assert len(open_promises()) == 1


def test_a_named_promise_is_about_the_same_work_as_a(capture: Capture) -> None:
    a, b = capture(), capture(16.4, dtype=BF16)
    work = replace(compared(a, a).workload, script="vae.py", signature="0123456789abcdef")
    made = promised(a, workload=work)
    why = reason(with_promise(compared(a, b), made.id))
    assert why == (
        "A does other work than the prediction is about: script train.py, not vae.py, "
        "its operators have other shapes"
    )
    slow = promised(a, baseline_ms=50.0)
    assert "the prediction is about 50.0 ms" in reason(with_promise(compared(a, b), slow.id))


def test_a_name_nobody_has_is_wrong_use(capture: Capture) -> None:
    with pytest.raises(UsageError, match="no prediction has that id"):
        with_promise(compared(capture(), capture()), "zzz")


def test_profiled_steps_answer_no_promise(golden: Path) -> None:
    trace = str(golden / "h200-resnet18/rank-00000/trace.json.gz")
    found = compare([trace], [trace], cache=False)
    made = remember(promise(workload=found.workload))
    assert "these steps are profiled" in reason(with_promise(found))
    assert "these steps are profiled" in reason(with_promise(found, made.id))


def test_shortened_tables_say_nothing_of_a_step(capture: Capture) -> None:
    """Of more than 64 ranks only the longest rows are kept, and not the same ones of A and B."""
    from stepscope.explain.explain_job import explain_job
    from stepscope.explain.rank import truncate_tables
    from stepscope.verify.traits import describe_workload, read_traits

    whole = explain_job(str(capture()), cache=False)
    cut = replace(whole, ranks=tuple(truncate_tables(rank, 2) for rank in whole.ranks))
    assert read_traits({}, whole).gradients
    assert describe_workload({}, whole).signature
    assert not read_traits({}, cut).gradients
    assert "optimizer" not in read_traits({}, cut).words
    assert describe_workload({}, cut).signature is None


# The record is not poisoned


_OTHERS: tuple[tuple[float, dict[str, Any], dict[str, Any]], ...] = (
    (20.0, {}, {"width": 32}),
    (20.3, {}, {"layers": 3, "width": 24}),
    (19.8, {"argv": ["mnist.py"]}, {"width": 32, "dtype": BF16}),
    (8.0, {"argv": ["mnist.py"]}, {"width": 8, "batch": 64}),
    (160.0, {"argv": ["mnist.py"]}, {"width": 64, "dtype": BF16}),
    (12.0, {}, {"width": 32, "optimizer": "fused"}),
    (30.0, {"argv": ["train.py"]}, {"batch": 12, "dtype": BF16}),
    (20.0, {"host": "elsewhere"}, {"dtype": BF16}),
    (16.0, {"torch": "2.14"}, {"dtype": BF16}),
    (16.0, {}, {"dtype": BF16, "optimizer": "plain"}),
)


def test_ten_comparisons_with_other_work_change_nothing(capture: Capture) -> None:
    a = capture()
    for name in ("precision=bf16", "optimizer=fused", "batch=x2", "no-data-wait", "compile"):
        promised(a, name, id=name)
    for ms, facts, step in _OTHERS:
        b = capture(ms, facts, **step)
        for pair in ((a, b), (b, a)):
            assert with_promise(compared(*pair)).promise is None
    _check_untouched()


def test_ten_comparisons_of_a_with_a_change_nothing(capture: Capture) -> None:
    a = capture()
    for name in ("precision=bf16", "optimizer=fused", "batch=x2", "no-data-wait", "compile"):
        promised(a, name, id=name)
    for ms in (20.0, 20.1, 19.9, 20.4, 19.6, 21.0, 19.0, 22.0, 18.0, 16.0):
        assert with_promise(compared(a, capture(ms))).promise is None
    assert with_promise(compared(a, capture(16.0)), "optimizer=fused").promise is None
    _check_untouched()


def _check_untouched() -> None:
    assert len(open_promises()) == 5
    for each in history():
        assert adjust(each.promise.name, 10.0, 9.0, 11.0, history()) == (10.0, 9.0, 11.0)


def stalling(capture: Capture, ms: float, wait_ms: float, **step: Any) -> Path:
    """Every fourth step takes `wait_ms` longer."""
    folder = capture(ms, **step)
    steps = [own + wait_ms * (i % 4 == 0) for i, own in enumerate(noisy(ms, steps=400))]
    rank = folder / "rank-00000"
    written = write_run(folder.parent / f"{folder.name}-steps", steps)
    (rank / "steps.jsonl").write_bytes((written / "rank-00000/steps.jsonl").read_bytes())
    return folder


@pytest.mark.parametrize(("basis", "a_ms", "b_ms"), [("mean", 30, 21), ("median", 20, 16)])
def test_a_promise_is_answered_by_the_step_it_is_about(
    capture: Capture, basis: str, a_ms: float, b_ms: float
) -> None:
    """Means of 20 + 10 and 16 + 5 ms: stalls halve, the typical step is a fifth shorter."""
    a, b = stalling(capture, 20, 40), stalling(capture, 16, 20, dtype=BF16)
    promised(a, basis=basis, baseline_ms=float(a_ms))
    found = with_promise(compared(a, b))
    assert found.promise is not None
    delivered = found.promise.delivery
    assert delivered is not None
    assert delivered.basis == basis
    assert delivered.a_ms == pytest.approx(a_ms, rel=0.02)
    assert delivered.b_ms == pytest.approx(b_ms, rel=0.02)
    assert found.a_ms == pytest.approx(30, rel=0.02)


def test_an_answer_on_another_basis_does_not_count() -> None:
    from promises import delivery

    from stepscope.verify.track_record import why_ignored

    about_means = promise(basis="mean")
    answer = delivery(promise=about_means.id, a_ms=about_means.baseline_ms, named=True)
    assert why_ignored(about_means, answer) == (
        "it is about median steps, but the prediction is about mean steps"
    )
