"""Where a statement about the model belongs: once, when it is complete, before training."""

from __future__ import annotations

import pytest

from stepscope.fix.proposal import Proposal, Script, add_before_training, edited, submodule
from stepscope.fix.remedies.precision import wrap_forward
from stepscope.records.script_facts import Frame, RootCall, ScriptFacts, TrainingPass


def _frames(text: str, *marks: tuple[str, str]) -> tuple[Frame, ...]:
    """Innermost first; each is found by a piece of its line."""
    lines = text.splitlines()
    return tuple(
        Frame(
            file="train.py",
            line=next(number for number, line in enumerate(lines, 1) if piece in line),
            function=function,
        )
        for piece, function in marks
    )


def _edited(text: str, proposal: Proposal) -> str:
    data = text.encode()
    return edited(proposal.edits, lambda _file: data).get("train.py", data).decode()


def _add(text: str, *marks: tuple[str, str, str]) -> tuple[Proposal, str]:
    """Marks are a piece of the line, the function, and what it calls the model."""
    frames = _frames(text, *((piece, function) for piece, function, _ in marks))
    call = RootCall(type="Net", frames=frames, names=tuple(name for _, _, name in marks))
    script = Script(ScriptFacts(root_calls=(call,)), lambda _file: text.encode())
    proposal = add_before_training(script, lambda name, _call: (f"{name}.compile()",))
    return proposal, _edited(text, proposal)


def test_before_the_loop_that_calls_the_function() -> None:
    text = """\
def epoch(model):
    for x in data:
        loss = model(x)

model = Net()
for number in range(3):
    epoch(model)
"""
    _, changed = _add(
        text, ("= model(x)", "epoch", "model"), ("    epoch(model)", "<module>", "model")
    )
    assert "model = Net()\nmodel.compile()\nfor number in" in changed


def test_a_model_that_a_loop_makes_is_changed_in_that_loop() -> None:
    text = """\
for fold in folds:
    model = Net()
    for x in data:
        loss = model(x)
"""
    _, changed = _add(text, ("= model(x)", "<module>", "model"))
    assert "    model = Net()\n    model.compile()\n    for x in data:\n" in changed


def test_an_attribute_is_changed_where_it_is_set() -> None:
    """The only function that has a name for the model runs once per step."""
    text = """\
class Task:
    def __init__(self):
        self.net = Net()

    def step(self, x):
        return self.net(x)

task = Task()
for x in data:
    loss = task.step(x)
"""
    _, changed = _add(
        text, ("self.net(x)", "Task.step", "self.net"), ("task.step(x)", "<module>", "")
    )
    assert "        self.net = Net()\n        self.net.compile()\n\n    def step" in changed


def test_a_place_that_runs_again_and_again_is_left_to_the_user() -> None:
    text = """\
def step(model, x):
    return model(x)

for x in data:
    step(models[0], x)
"""
    proposal, changed = _add(
        text, ("return model(x)", "step", "model"), ("step(models[0]", "<module>", "")
    )
    assert changed == text
    assert proposal.by_hand == (
        "once, before training (Net is called at train.py:2): model.compile()",
    )


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("", "model"),
        ("module.layers", "model.module.layers"),
        ("0.layers", 'model.get_submodule("0.layers")'),
    ],
)
def test_a_module_inside_another(path: str, text: str) -> None:
    assert submodule("model", path) == text


def _wrap(text: str, forward: tuple[str, str], backward: tuple[str, str]) -> tuple[Proposal, str]:
    one = TrainingPass(forwards=(_frames(text, forward),), backward=_frames(text, backward))
    script = Script(ScriptFacts(passes=(one,), device="cuda"), lambda _file: text.encode())
    proposal = wrap_forward(script, "bfloat16")
    return proposal, _edited(text, proposal)


def test_autocast_ends_before_the_condition_that_backward_stands_in() -> None:
    text = """\
import torch
for x in data:
    loss = model(x)
    if loss.isfinite():
        loss.backward()
"""
    _, changed = _wrap(text, ("model(x)", "<module>"), ("backward", "<module>"))
    assert changed.splitlines()[2:] == [
        '    with torch.autocast("cuda", dtype=torch.bfloat16):',
        "        loss = model(x)",
        "    if loss.isfinite():",
        "        loss.backward()",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "for x in data: loss = model(x); loss.backward()\n",
        "for x in data:\n    loss = model(x); loss.backward()\n",
        "for x in data:\n    model(x).backward()\n",
    ],
)
def test_statements_that_share_a_line_are_not_wrapped(text: str) -> None:
    proposal, changed = _wrap(text, ("model(x)", "<module>"), ("backward", "<module>"))
    assert changed == text
    assert "backward starts at train.py:" in proposal.by_hand[0]
