"""pin-ranks, cpu-allocator, flush-denormal, onednn, vectors, expandable-segments."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from injected import TRAINING, assert_patch_trains_the_same, patch_of, run_injected

from stepscope.fix.named_changes import choose_all, environment, load_change, with_changes
from stepscope.fix.proposal import Script
from stepscope.fix.remedies import host
from stepscope.fix.remedies.cores import share_cores
from stepscope.records.script_facts import ScriptFacts

if TYPE_CHECKING:
    from pathlib import Path

needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs Linux and two cores",
)


def why(remedy: str, value: str = "", **facts: Any) -> str | None:
    return load_change(remedy).fix.fits(ScriptFacts(**facts), value)


def nothing(_file: str) -> None:
    return None


def test_ranks_are_spread_over_nodes() -> None:
    nodes = {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}
    alone = lambda core: core  # noqa: E731
    assert share_cores(nodes, 2, alone) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert share_cores(nodes, 4, alone) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert share_cores(nodes, 3, alone) == [(0, 1, 2), (3, 4, 5), (6, 7)]
    assert share_cores(nodes, 1, alone) == [(0, 1, 2, 3)]
    assert share_cores(nodes, 16, alone) == []
    assert share_cores(nodes, 2, alone, [1, 0]) == [(4, 5, 6, 7), (0, 1, 2, 3)]
    assert share_cores(nodes, 3, alone, [1, 1, 0]) == [(4, 5), (6, 7), (0, 1, 2, 3)]
    assert share_cores(nodes, 2, alone, [1, None]) == share_cores(nodes, 2, alone)


def test_cores_that_share_their_units_go_to_one_rank() -> None:
    nodes = {0: (0, 1, 2, 3, 8, 9, 10, 11)}
    assert share_cores(nodes, 2, lambda core: core % 8) == [(0, 1, 8, 9), (2, 3, 10, 11)]
    assert share_cores(nodes, 5, lambda core: core % 8) == []  # there are four


def test_where_pinning_can_help() -> None:
    shared = {"cores": 8, "machine_cores": 8}
    assert why("pin-ranks", local_ranks=2, **shared) is None
    assert why("pin-ranks", numa_nodes=2, **shared) is None
    assert "to itself" in str(why("pin-ranks", **shared))
    assert "already" in str(why("pin-ranks", local_ranks=2, cores=4, machine_cores=8))
    assert "fewer" in str(why("pin-ranks", local_ranks=9, **shared))


@pytest.mark.slow
@needs_affinity
def test_each_rank_gets_cores_of_its_own(tmp_path: Path) -> None:
    script = TRAINING.replace("import torch\n", "import os, torch\n", 1) + (
        "    if step == 0: print('rank', os.environ['LOCAL_RANK'], sorted(os.sched_getaffinity(0)))"
        "\n"
    )
    run = run_injected(tmp_path, script, "pin-ranks", ranks=2)
    (did,) = run.did["pin-ranks"]
    assert did.startswith("local rank 0 keeps to cores ")
    rows = {row for row in run.output.splitlines() if row.startswith("rank")}
    cores = [set(map(int, row.split("[")[1].rstrip("]").split(","))) for row in sorted(rows)]
    assert len(cores) == 2
    assert cores[0].isdisjoint(cores[1])
    proposal, _ = patch_of(run_injected(tmp_path, script, ranks=2), "pin-ranks")
    assert "taskset -c" in proposal.by_hand[0]


def test_an_allocator_that_is_not_there_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "find_library", lambda _name: None)
    assert "apt install libjemalloc2" in str(why("cpu-allocator", "jemalloc"))
    assert environment(choose_all(["cpu-allocator=jemalloc"]), {}) == {}


def test_an_allocator_is_loaded_before_the_users_own_libraries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "find_library", lambda name: f"/lib/lib{name}.so.4")
    assert why("cpu-allocator", "tcmalloc") is None
    assert why("cpu-allocator", "tcmalloc", device="cuda") == "the model is not on the CPU"
    other = {"LD_PRELOAD": "/opt/libjemalloc.so"}
    assert "already" in str(why("cpu-allocator", "tcmalloc", variables=other))
    chosen = choose_all(["cpu-allocator"])
    once = environment(chosen, {"LD_PRELOAD": "/opt/mine.so"})
    assert once == {"LD_PRELOAD": "/lib/libtcmalloc.so.4:/opt/mine.so"}
    assert environment(chosen, with_changes({}, once)) == once


def test_a_library_is_found_in_a_conda_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libjemalloc.so.2").touch()
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path))
    assert host.find_library("jemalloc") == f"{tmp_path}/lib/libjemalloc.so.2"


@pytest.mark.slow
def test_an_allocator_that_was_not_loaded_is_refused(tmp_path: Path) -> None:
    run = run_injected(tmp_path, TRAINING, "cpu-allocator=jemalloc")
    if "cpu-allocator=jemalloc" in run.refused:
        assert "install" in run.refused["cpu-allocator=jemalloc"]
    else:
        assert "CPU memory comes from jemalloc" in run.did["cpu-allocator=jemalloc"]


DENORMAL = TRAINING.replace(
    "    loss.backward()",
    "    loss = loss + (torch.full((4,), 1e-39) * 1e38).sum()\n    loss.backward()",
)


@pytest.mark.slow
@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot")
def test_denormal_values_become_zero_as_in_the_patch(tmp_path: Path) -> None:
    plain = run_injected(tmp_path, DENORMAL)
    assert not plain.facts.flushes_denormals
    source = assert_patch_trains_the_same(tmp_path, DENORMAL, "flush-denormal")
    assert "\ntorch.set_flush_denormal(True)\n" in source
    flushed = run_injected(tmp_path, DENORMAL, "flush-denormal")
    assert flushed.facts.flushes_denormals
    assert flushed.values[0] == pytest.approx(plain.values[0] - 0.4, abs=1e-3)


def test_when_denormal_values_cannot_be_the_reason() -> None:
    assert why("flush-denormal") is None
    assert "already" in str(why("flush-denormal", flushes_denormals=True))
    assert why("flush-denormal", device="cuda") == "the model is not on the CPU"


OFF = "torch.backends.mkldnn.enabled = False"
needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch without oneDNN"
)


@pytest.mark.slow
@needs_onednn
@pytest.mark.parametrize("inside", [False, True])
def test_onednn_is_turned_on_again(tmp_path: Path, *, inside: bool) -> None:
    if inside:
        script = TRAINING.replace(
            "    logits = model(x)",
            "    with torch.backends.mkldnn.flags(enabled=False):\n        logits = model(x)",
        )
    else:
        script = TRAINING.replace("torch.manual_seed(0)", f"torch.manual_seed(0)\n{OFF}")
    plain = run_injected(tmp_path, script)
    assert plain.facts.onednn is False
    assert load_change("onednn").fix.fits(plain.facts, "") is None
    run = run_injected(tmp_path, script, "onednn")
    assert run.did["onednn"] == ["oneDNN is on"]
    proposal, text = patch_of(plain, "onednn")
    assert not proposal.by_hand
    assert b"False" not in text


@pytest.mark.slow
@needs_onednn
def test_onednn_is_on_by_default(tmp_path: Path) -> None:
    run = run_injected(tmp_path, TRAINING, "onednn")
    assert run.did["onednn"] == []
    assert load_change("onednn").fix.fits(run.facts, "") == "oneDNN is on already"
    assert why("onednn", onednn=None) == "this torch was built without oneDNN"


@pytest.mark.slow
def test_a_capability_that_the_shell_sets_is_unset(tmp_path: Path) -> None:
    script = TRAINING + (
        "    import os; print('capability', os.environ.get('ATEN_CPU_CAPABILITY'))\n"
    )
    users = {"ATEN_CPU_CAPABILITY": "default"}
    plain = run_injected(tmp_path, script, variables=users)
    assert "capability default" in plain.output
    assert load_change("vectors").fix.fits(plain.facts, "") is None
    run = run_injected(tmp_path, script, "vectors", variables=users)
    assert set(run.output.splitlines()) == {"capability None"}
    assert run.did["vectors"]
    assert "not set" in str(load_change("vectors").fix.fits(run.facts, ""))


@pytest.mark.slow
def test_a_capability_that_the_script_sets_is_unset_too(tmp_path: Path) -> None:
    script = (
        "import os\nos.environ['ATEN_CPU_CAPABILITY'] = 'default'\n"
        + TRAINING
        + "    print('capability', os.environ.get('ATEN_CPU_CAPABILITY'))\n"
    )
    run = run_injected(tmp_path, script, "vectors")
    assert set(run.output.splitlines()) == {"capability None"}


@pytest.mark.parametrize(
    ("users", "changes"),
    [
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128, expandable_segments:False"},
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:True"},
        ),
        (
            {"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.8"},
            {"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.8,expandable_segments:True"},
        ),
    ],
)
def test_other_settings_of_the_allocator_stay(
    users: dict[str, str], changes: dict[str, str]
) -> None:
    chosen = choose_all(["expandable-segments"])
    assert environment(chosen, users) == changes
    assert environment(chosen, with_changes(users, environment(chosen, users))) == changes


def test_where_segments_can_be_expandable(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "PYTORCH_CUDA_ALLOC_CONF"
    assert why("expandable-segments", device="cuda") is None
    assert "CUDA" in str(why("expandable-segments"))
    for text in ("expandable_segments: True", "backend:cudaMallocAsync"):
        assert why("expandable-segments", device="cuda", variables={name: text}) is not None
    monkeypatch.setenv(name, "max_split_size_mb:64")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    proposal = load_change("expandable-segments").fix.patch(Script(ScriptFacts(), nothing), "")
    assert proposal.variables == {name: "max_split_size_mb:64,expandable_segments:True"}


@pytest.mark.slow
def test_a_variable_that_the_script_changes_again_is_not_taken_for_set(tmp_path: Path) -> None:
    script = (
        "import os\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'max_split_size_mb:64'\n" + TRAINING
    )
    run = run_injected(tmp_path, script, "expandable-segments")
    assert "max_split_size_mb:64" in run.refused["expandable-segments"]
    assert not run.did["expandable-segments"]
