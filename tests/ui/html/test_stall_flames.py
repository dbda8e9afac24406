"""Why steps stall: sentences, and the tree of stacks that the page draws."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from made_runs import make_run
from stepscope.records.source_lines import LineDifference, Place, StackDifference, StackShare
from stepscope.ui.html.panes.run import NOT_SAMPLED, build_tree, describe_lines, stall_reasons
from stepscope.ui.html.run_points import stall_rows

MAIN = Place(file="/home/u/train.py", line=10, function="main")
SAVE = Place(file="/home/u/train.py", line=41, function="log_images")
WRITE = Place(file="/usr/lib/python3/site-packages/PIL/Image.py", line=7, function="save")
LOGGING = StackDifference(
    cause="logging",
    stalled_steps=10,
    typical_steps=90,
    stalled_samples=100,
    typical_samples=225,
    stalled_ms=200.0,
    typical_ms=50.0,
    stacks=(
        StackShare(frames=(MAIN, SAVE, WRITE), stalled=0.70, typical=0.0),
        StackShare(frames=(MAIN, SAVE), stalled=0.05, typical=0.04),
        StackShare(frames=(MAIN,), stalled=0.23, typical=0.96),
    ),
)


def ranks_with(difference):
    run = make_run(1_000, 1)
    return [replace(run.ranks[0], stacks=(difference,) if difference else ())]


def test_stacks_that_begin_alike_share_their_nodes():
    tree = build_tree(LOGGING)
    assert tree.frame == [None, MAIN, SAVE, WRITE]
    assert tree.parent == [-1, 0, 1, 2]
    assert tree.stalled_ns == [200_000_000, 196_000_000, 150_000_000, 140_000_000]
    assert tree.typical_ns == [50_000_000, 50_000_000, 2_000_000, 0]
    assert tree.samples == [100, 98, 75, 70]


def test_own_times_add_up_to_what_was_sampled():
    tree = build_tree(LOGGING)
    assert tree.self_ns == [0, 46_000_000, 10_000_000, 140_000_000]
    assert sum(tree.self_ns) == tree.stalled_ns[1]


def test_a_stack_without_frames_is_the_steps_own_time():
    bare = replace(LOGGING, stacks=(StackShare(frames=(), stalled=1.0, typical=1.0),))
    tree = build_tree(bare)
    assert (tree.parent, tree.self_ns) == ([-1], [200_000_000])


def test_the_sentence_names_the_line_and_what_it_takes():
    line = LineDifference(place=SAVE, more_ms=149.0, low_ms=130.0, high_ms=168.0)
    assert describe_lines([line]) == (
        "In stalled steps train.py:41 log_images runs for 149 ms (130 to 168) more than in "
        "typical ones."
    )
    other = LineDifference(place=MAIN, more_ms=20.0, low_ms=10.0, high_ms=30.0)
    assert describe_lines([line, other, other]).endswith(
        "typical ones, and train.py:10 main for 20.0 ms (10.0 to 30.0) more."
    )


def test_no_clear_line_is_said():
    assert describe_lines([]).startswith("No line of code runs clearly longer")


def test_every_row_of_the_table_has_a_reason(decode):
    ranks = ranks_with(LOGGING)
    rows = stall_rows(ranks)
    reasons, payload = stall_reasons(ranks, rows)
    assert [reason["cause"] for reason in reasons] == [row.cause for row in rows]
    by_cause = {reason["cause"]: reason for reason in reasons}
    assert by_cause["data"]["words"] == NOT_SAMPLED
    assert not by_cause["data"]["sampled"]
    logging = by_cause["logging"]
    assert logging["words"].startswith("In stalled steps train.py:41 log_images runs for 148 ms (")
    assert logging["about"] == "100 samples in 10 stalled steps, 225 samples in typical ones"
    assert logging["left_out"] == "Stacks of 2.0% of the time are left out: they differ least."
    head, columns = decode(payload)
    assert head["strings"][columns["logging_name"][2]] == "/home/u/train.py(41): log_images"
    assert columns["logging_kind"].tolist() == [0, 1, 1, 0]  # the user's own code
    assert columns["logging_total"].tolist() == build_tree(LOGGING).stalled_ns
    assert columns["logging_typical"].tolist() == build_tree(LOGGING).typical_ns


def test_ranks_are_drawn_together():
    run = make_run(1_000, 2)
    ranks = [replace(rank, stacks=(LOGGING,)) for rank in run.ranks]
    reasons, _ = stall_reasons(ranks, stall_rows(ranks))
    logging = next(reason for reason in reasons if reason["cause"] == "logging")
    assert logging["about"] == (
        "200 samples in 20 stalled steps, 450 samples in typical ones; all ranks together"
    )


def test_a_run_without_samples_has_no_block():
    ranks = ranks_with(None)
    reasons, payload = stall_reasons(ranks, stall_rows(ranks))
    assert payload == ""
    assert {reason["words"] for reason in reasons} == {NOT_SAMPLED}


def test_two_hundred_deep_stacks_stay_small():
    """200 stacks of 40 frames, all different from the tenth frame on."""
    frames = [Place(file=f"/home/u/project/module_{i}.py", line=i, function="f") for i in range(50)]
    stacks = tuple(
        StackShare(
            frames=(*frames[:10], *(replace(f, line=1000 + s) for f in frames[:30])),
            stalled=1 / 200,
            typical=1 / 200,
        )
        for s in range(200)
    )
    ranks = ranks_with(replace(LOGGING, stacks=stacks))
    _, payload = stall_reasons(ranks, stall_rows(ranks))
    assert len(payload) < 60_000


@pytest.mark.parametrize("name", ["</script>", "日本語", "a\nb"])
def test_any_name_survives(decode, name):
    frames = (Place(file="x.py", line=1, function=name),)
    odd = replace(LOGGING, stacks=(StackShare(frames=frames, stalled=1.0, typical=0.0),))
    ranks = ranks_with(odd)
    _, payload = stall_reasons(ranks, stall_rows(ranks))
    assert decode(payload)[0]["strings"][1] == f"x.py(1): {name}"
