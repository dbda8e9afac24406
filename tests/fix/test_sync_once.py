"""Gradients are exchanged once a step: injected, patched, and where neither can be."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from ddp_scripts import COUNTED, GUARDED, LEFT_OVER, OWN_NO_SYNC
from injected import assert_patch_trains_the_same, run_injected
from test_ddp_remedies import facts_of

from stepscope.fix.named_changes import load_change
from stepscope.fix.proposal import Script, edited
from stepscope.records.script_facts import Frame, RootCall, ScriptFacts, TrainingPass

if TYPE_CHECKING:
    from pathlib import Path

CHANGE = load_change("sync-once")
SYNC_ONCE = CHANGE.fix
ACCUMULATING = replace(facts_of(), passes_per_step=4, synced_passes=4)


@pytest.mark.slow
def test_a_guarded_step_trains_as_its_patch(tmp_path: Path) -> None:
    source = assert_patch_trains_the_same(tmp_path, GUARDED, "sync-once=4", ranks=2)
    assert "with contextlib.nullcontext() if (i + 1) % 4 == 0 else model.no_sync():" in source


@pytest.mark.slow
def test_a_loop_of_passes_trains_as_its_patch(tmp_path: Path) -> None:
    source = assert_patch_trains_the_same(tmp_path, COUNTED, "sync-once=3", ranks=2)
    assert "with contextlib.nullcontext() if part + 1 == passes else net.no_sync():" in source


@pytest.mark.slow
def test_a_step_that_comes_early_gets_averaged_gradients(tmp_path: Path) -> None:
    plain = run_injected(tmp_path, LEFT_OVER, ranks=2)
    changed = run_injected(tmp_path, LEFT_OVER, "sync-once=4", ranks=2)
    assert changed.did["sync-once=4"] == [
        "gradients are exchanged in the last of 4 backward passes",
        "gradients that were used after 2 instead of 4 passes were averaged first",
    ]
    assert len(changed.losses) == 22
    assert changed.values == pytest.approx(plain.values, rel=1e-5)


@pytest.mark.slow
def test_passes_that_the_script_keeps_to_itself_stay_as_they_are(tmp_path: Path) -> None:
    run = run_injected(tmp_path, OWN_NO_SYNC, "sync-once", ranks=2, steps=4)
    assert (run.facts.passes_per_step, run.facts.synced_passes) == (3, 1)
    assert "already run under no_sync()" in (SYNC_ONCE.fits(run.facts, "") or "")
    assert not run.refused


def test_the_number_of_passes_is_the_value_to_try() -> None:
    assert CHANGE.values_for(ACCUMULATING) == ("4",)
    assert SYNC_ONCE.fits(ACCUMULATING, "4") is None
    assert SYNC_ONCE.fits(ACCUMULATING, "") is None


@pytest.mark.parametrize(
    ("facts", "value", "words"),
    [
        (ACCUMULATING, "3", "4 backward passes, not 3"),
        (replace(ACCUMULATING, passes_per_step=None), "", "per step varies"),
        (replace(ACCUMULATING, passes_per_step=1, synced_passes=1), "", "one backward pass"),
        (replace(ACCUMULATING, synced_passes=1), "", "already run under no_sync()"),
        (replace(ACCUMULATING, built=()), "", "set_requires_gradient_sync"),
        (replace(facts_of(static_graph=True), passes_per_step=4, synced_passes=4), "", "static"),
    ],
)
def test_what_it_cannot_help_is_told(facts: ScriptFacts, value: str, words: str) -> None:
    assert words in (SYNC_ONCE.fits(facts, value) or "")


LOOP = """\
model = DDP(net)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
"""


def patched(
    text: str, forward: str = "model(x)", step: str = "optimizer.step()", name: str = "model"
) -> str | None:
    """The text with the remedy's edits; None where it must be done by hand."""
    lines = text.splitlines()

    def frame_of(part: str, function: str) -> Frame:
        line = next(number for number, one in enumerate(lines, 1) if part in one)
        return Frame(file="train.py", line=line, function=function)

    built = replace(ACCUMULATING.built[0], frames=(frame_of("DDP(", "<module>"),))
    function = "train" if "def train" in text else "<module>"
    call = RootCall(
        type="DistributedDataParallel", frames=(frame_of(forward, function),), names=(name,)
    )
    facts = replace(
        ACCUMULATING,
        built=(built,),
        root_calls=(call,),
        forward=call.frames,
        backward=(frame_of("backward()", function),),
        step=(frame_of(step, function),),
    )
    proposal = SYNC_ONCE.patch(Script(facts, lambda _file: text.encode()), "4")
    if proposal.by_hand:
        assert not proposal.edits
        assert "train.py:" in proposal.by_hand[0]
        return None
    result = edited(proposal.edits, lambda _file: text.encode())["train.py"].decode()
    compile(result, "train.py", "exec")
    return result


def header(result: str | None) -> str:
    assert result is not None, "it must be done by hand"
    (line,) = (line.strip() for line in result.splitlines() if "no_sync" in line)
    return line


def with_test(test: str, name: str = "model") -> str:
    return f"with contextlib.nullcontext() if {test} else {name}.no_sync():"


def test_the_guards_own_test_says_which_pass_is_the_last() -> None:
    assert (
        patched(LOOP)
        == """\
import contextlib

model = DDP(net)
for i, (x, y) in enumerate(loader):
    with contextlib.nullcontext() if (i + 1) % 4 == 0 else model.no_sync():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
"""
    )


@pytest.mark.parametrize(
    ("old", "new", "test"),
    [
        ("(i + 1) % 4 == 0", "i % 4 == 3 or i + 1 == len(loader)", None),
        ("(i + 1) % 4 == 0", "not (i + 1) % args.passes", None),
        ("    if (i + 1) % 4", "    i += 1\n    if i % 4", "(i + 1) % 4 == 0"),
        ("    if (i + 1)", "    total += 1\n    print(loss)\n    if (i + 1)", "(i + 1) % 4 == 0"),
        ("        optimizer.step()", "        if ok:\n            optimizer.step()",
         "(i + 1) % 4 == 0"),
    ],
)  # fmt: skip
def test_tests_that_can_be_asked_before_the_pass(old: str, new: str, test: str | None) -> None:
    assert header(patched(LOOP.replace(old, new))) == with_test(test or new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(i + 1) % 4 == 0", "next(boundaries)"),  # asking changes it
        ("(i + 1) % 4 == 0", "loss.isfinite()"),  # not known before the pass
        ("loss = F", "last = loss = F"),  # stored in the pass, see below
        ("    if (i + 1)", "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    if (i + 1)"),
        ("    if (i + 1)", "    scaler.unscale_(optimizer)\n    if (i + 1)"),
        ("    if (i + 1) % 4 == 0:", "    if (i + 1) % 4:\n        pass\n    else:"),
        ("    if (i + 1) % 4 == 0:\n    ", ""),  # a step in every pass
        ("    loss = F", "    n = 1; loss = F"),  # no line of its own
        ("    if (i + 1)", "    i += 1\n    i -= 1\n    if (i + 1)"),
    ],
)
def test_anything_less_sure_is_left_to_the_user(old: str, new: str) -> None:
    text = LOOP.replace(old, new)
    if "last" in new:
        text = text.replace("(i + 1) % 4 == 0", "last % 4 == 0")
    assert text != LOOP
    assert patched(text) is None


def test_a_step_for_what_is_left_after_an_epoch_is_left_to_the_user() -> None:
    assert patched(LOOP + "optimizer.step()\n", step="        optimizer.step()") is None


def test_another_function_that_changes_the_counter_is_noticed() -> None:
    text = "def count():\n    global i\n    i += 1\n\n\n" + LOOP
    assert patched(text) is None
    args = LOOP.replace("% 4", "% args.passes")
    assert patched("args.passes = 4\n" + args) is not None  # before the loop
    changing = "def count():\n    args.passes += 1\n\n\n" + LOOP
    assert patched(changing.replace("% 4", "% args.passes")) is None


TRAINER = """\
class Trainer:
    def __init__(self, net, passes):
        self.passes = passes
        self.model = DDP(net)

    def train(self):
        for x, y in self.loader:
            with torch.autocast("cuda"):
                loss = self.criterion(self.model(x), y)
            if self.scaler:
                self.scaler.scale(loss).backward()
            else:
                loss.backward()
            self.number += 1
            if self.number % self.passes == 0:
                self.scaler.step(self.optimizer)
"""


def test_a_method_is_wrapped_where_its_counter_stands_still() -> None:
    assert patched(TRAINER, step="scaler.step(", forward="self.model(x)", name="self.model") is None
    fixed = TRAINER.replace("self.number += 1\n            ", "")
    fixed = fixed.replace("for x, y in self.loader", "for self.number, (x, y) in loader")
    result = patched(fixed, step="scaler.step(", forward="self.model(x)", name="self.model")
    assert header(result) == with_test("self.number % self.passes == 0", "self.model")
    assert "                with torch.autocast" in (result or "")
    assert "                    self.scaler.scale(loss).backward()" in (result or "")
    either = "            else:\n                loss.backward()\n"
    assert either in fixed
    skipping = fixed.replace(either, "")
    assert (
        patched(skipping, step="scaler.step(", forward="self.model(x)", name="self.model") is None
    )


PASSES = """\
net = wrap(DDP(model))


def train(net):
    for step in range(steps):
        for part in range(passes):
            loss = net(batches[part])
            loss.backward()
        optimizer.step()
"""


def test_a_loop_of_passes_counts_them() -> None:
    test = with_test("part + 1 == passes", "net")
    assert header(patched(PASSES, forward="loss = net(", name="net")) == test
    tabs = PASSES.replace("    ", "\t")
    result = patched(tabs, forward="loss = net(", name="net") or ""
    assert f"\n\t\t\t{test}\n\t\t\t\tloss = net(" in result


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("loss.backward()", "loss.backward()\n            if loss < 1:\n                break"),
        ("loss =", "part = 1\n            loss ="),
        ("range(passes)", "range(2, passes)"),
        ("range(passes)", "parts"),
        ("            loss.b", "            if loss > 0:\n                loss.b"),
    ],
)
def test_loops_that_may_end_elsewhere_are_left_to_the_user(old: str, new: str) -> None:
    text = PASSES.replace(old, new)
    assert text != PASSES
    assert patched(text, forward="loss = ", name="net") is None
    assert patched(PASSES, forward="loss = ", name="") is None  # the loop has no name for it


def test_wraps_of_several_remedies_stand_inside_each_other() -> None:
    """bf16 covers forward and loss; sync-once covers backward too."""
    text = "import contextlib\nimport torch\n" + LOOP.replace("    loss.b", "\n    loss.b")

    def frame(line: int) -> tuple[Frame, ...]:
        return (Frame(file="train.py", line=line, function="<module>"),)

    built = replace(ACCUMULATING.built[0], frames=frame(3))
    facts = replace(
        ACCUMULATING,
        built=(built,),
        forward=frame(5),
        backward=frame(7),
        step=frame(9),
        passes=(TrainingPass(forwards=(frame(5),), backward=frame(7)),),
        root_calls=(RootCall(type="DistributedDataParallel", frames=frame(5), names=("model",)),),
    )
    script = Script(facts, lambda _file: text.encode())
    for order in (("bf16", "sync-once"), ("sync-once", "bf16")):
        first, second = (load_change(name).fix.patch(script, "") for name in order)
        result = edited((first + second).edits, lambda _file: text.encode())["train.py"].decode()
        assert result.splitlines()[4:9] == [
            "    with contextlib.nullcontext() if (i + 1) % 4 == 0 else model.no_sync():",
            '        with torch.autocast("cuda", dtype=torch.bfloat16):',
            "            loss = F.cross_entropy(model(x), y)",
            "",
            "        loss.backward()",
        ]
