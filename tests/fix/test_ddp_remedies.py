"""Remedies of DistributedDataParallel, on two gloo ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from ddp_scripts import BRANCHES, PLAIN
from injected import assert_patch_trains_the_same, patch_of, run_injected

from stepscope.errors import UsageError
from stepscope.fix.named_changes import choose, choose_all
from stepscope.fix.proposal import Script, edited
from stepscope.fix.remedies.ddp import count_buckets
from stepscope.records.script_facts import Built, Frame, ScriptFacts

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
OPTIONS = {
    "bucket_cap_mb": None,
    "bucket_cap_mb_list": None,
    "find_unused_parameters": False,
    "gradient_as_bucket_view": False,
    "static_graph": False,
    "broadcast_buffers": None,
    "forward_sync_buffers": None,
}
PLACE = Frame(file="train.py", line=9, function="<module>")


def facts_of(**options: object) -> ScriptFacts:
    """A DDP of 60 MiB on two CUDA devices."""
    ddp = Built(
        kind="ddp",
        type="DistributedDataParallel",
        options={**OPTIONS, **options},
        given=tuple(options),
        frames=(PLACE,),
    )
    return ScriptFacts(
        device="cuda",
        built=(ddp,),
        world_size=2,
        backend="nccl",
        parameter_bytes=60 * MIB,
        dtypes=("float32",),
        passes_per_step=1,
        synced_passes=1,
    )


def why_not(name: str, facts: ScriptFacts) -> str | None:
    chosen = choose(name)
    return chosen.fix.fits(facts, chosen.value)


@pytest.mark.slow
def test_other_buckets_and_views_train_as_their_patches(tmp_path: Path) -> None:
    names = ("bucket-mb=0.005", "bucket-view", "no-buffer-broadcast")
    source = assert_patch_trains_the_same(tmp_path, PLAIN, *names, steps=8, ranks=2)
    assert (
        "DDP(model, bucket_cap_mb=0.005, gradient_as_bucket_view=True, forward_sync_buffers=False)"
        in source
    )


@pytest.mark.slow
def test_a_smaller_first_bucket_and_a_static_graph_only_change_the_buckets(tmp_path: Path) -> None:
    names = ("first-bucket-mb=0.001", "static-graph")
    plain = run_injected(tmp_path, PLAIN, steps=8, ranks=2)
    changed = run_injected(tmp_path, PLAIN, *names, steps=8, ranks=2)
    assert "buckets 2408016, 390000\n" in plain.output
    assert "buckets 6416, 2791600\n" in changed.output
    assert changed.losses == plain.losses  # two ranks: sums do not depend on their order
    _, text = patch_of(plain, *names)
    first = "torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 1048  # 0.001 MiB\n"
    assert f"{first}model = DDP(model, static_graph=True)" in text.decode()


@pytest.mark.slow
def test_a_hook_of_the_script_and_a_changing_graph_are_left_alone(tmp_path: Path) -> None:
    run = run_injected(tmp_path, BRANCHES, "compress-gradients", ranks=2)
    own = "the script registers its own communication hook"
    assert run.refused == {"compress-gradients": own}
    assert run.did == {"compress-gradients": []}
    assert run.facts.graph_changes is True
    assert run.facts.buffers == 3
    assert (
        why_not("static-graph", run.facts)
        == "the set of unused parameters changes from step to step"
    )
    assert why_not("no-buffer-broadcast", run.facts) is None


def test_hooks_are_registered_where_ddp_is_built() -> None:
    text = b"from torch.nn.parallel import DistributedDataParallel as DDP\n\nmodel = DDP(net)\n"
    built = replace(facts_of().built[0], frames=(replace(PLACE, line=3),))
    script = Script(replace(facts_of(), built=(built,)), lambda _file: text)
    for name, call in (
        ("compress-gradients", "(model.process_group, bf16_compress_hook)"),
        ("powersgd=2", "(PowerSGDState(model.process_group, matrix_approximation_rank=2, "),
    ):
        chosen = choose(name)
        proposal = chosen.fix.patch(script, chosen.value)
        result = edited(proposal.edits, lambda _file: text)["train.py"].decode()
        assert f"model = DDP(net)\nmodel.register_comm_hook{call}" in result
        assert "\nfrom torch.distributed.algorithms.ddp_comm_hooks." in result
        compile(result, "train.py", "exec")


def test_a_ddp_that_a_library_builds_is_left_to_the_user() -> None:
    built = replace(facts_of().built[0], direct=False)
    script = Script(replace(facts_of(), built=(built,)), lambda _file: b"trainer.fit(model)\n")
    for name in ("bucket-mb=50", "first-bucket-mb=4", "static-graph", "compress-gradients"):
        chosen = choose(name)
        proposal = chosen.fix.patch(script, chosen.value)
        assert not proposal.edits
        assert len(proposal.by_hand) == 1


@pytest.mark.parametrize(
    "name",
    [
        "bucket-mb=50",
        "first-bucket-mb=0.25",
        "bucket-view",
        "static-graph",
        "compress-gradients",
        "powersgd=2",
        "no-buffer-broadcast",
    ],
)
def test_they_need_ddp_on_several_ranks(name: str) -> None:
    fitting = replace(facts_of(), buffers=2)
    assert why_not(name, fitting) is None
    assert why_not(name, replace(fitting, world_size=1)) == "a single rank exchanges no gradients"
    assert why_not(name, replace(fitting, built=())) == (
        "no model is wrapped in DistributedDataParallel"
    )
    sharded = replace(fitting, built=(), modules={"FSDPLinear": 3})
    assert "FSDP" in (why_not(name, sharded) or "")


@pytest.mark.parametrize(
    ("name", "facts", "words"),
    [
        ("bucket-mb=25", facts_of(bucket_cap_mb=25), "25 MiB already"),
        ("bucket-mb=200", facts_of(bucket_cap_mb=100), "as many buckets"),
        ("bucket-mb=50", facts_of(bucket_cap_mb_list=[1, 2]), "its own size"),
        ("first-bucket-mb=4", facts_of(bucket_cap_mb=25), "Use bucket-mb"),
        ("first-bucket-mb=1", facts_of(), "already"),
        ("first-bucket-mb=4", replace(facts_of(), parameter_bytes=MIB), "fit into the first"),
        ("bucket-view", facts_of(gradient_as_bucket_view=True), "already"),
        ("static-graph", facts_of(static_graph=True), "already"),
        ("static-graph", replace(facts_of(), passes_per_step=4), "no_sync()"),
        ("compress-gradients", replace(facts_of(), device="cpu"), "NCCL only"),
        ("compress-gradients", replace(facts_of(), dtypes=("bfloat16",)), "fp32"),
        ("powersgd=2", replace(facts_of(), backend="gloo"), "needs NCCL"),
        ("no-buffer-broadcast", facts_of(), "no buffers"),
        ("no-buffer-broadcast", replace(facts_of(forward_sync_buffers=False), buffers=1), "does"),
        ("no-buffer-broadcast", replace(facts_of(broadcast_buffers=False), buffers=1), "does"),
    ],
)
def test_what_changes_nothing_is_not_tried(name: str, facts: ScriptFacts, words: str) -> None:
    assert words in (why_not(name, facts) or "")


def test_buckets_are_counted_as_ddp_fills_them() -> None:
    assert count_buckets(60 * MIB, 1, 25) == 4  # 1, 25, 25, 9
    assert count_buckets(60 * MIB, 50, 50) == 2
    assert count_buckets(MIB // 2, 1, 25) == 1
    assert count_buckets(100 * MIB, 50, 50) == 2


@pytest.mark.parametrize(
    "text",
    ["bucket-mb=zero", "bucket-mb=-1", "first-bucket-mb=inf", "powersgd=0", "sync-once=1"],
)
def test_values_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="does not take"):
        choose(text)


def test_only_one_remedy_changes_the_buckets() -> None:
    with pytest.raises(UsageError, match="cannot be applied together"):
        choose_all(["bucket-mb=50", "first-bucket-mb=4"])
    with pytest.raises(UsageError, match="cannot be applied together"):
        choose_all(["sync-once=4", "static-graph"])
