"""Places in scripts of other habits: statements that share a line, a trainer that owns the loop."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from stepscope.fix.named_changes import choose
from stepscope.fix.patched_source import patch_source
from stepscope.fix.proposal import edited
from stepscope.fix.python_source import NoPlaceError, PythonSource
from stepscope.fix.remedies.precision import why_not_autocast
from stepscope.records.script_facts import Built, Frame, RootCall, ScriptFacts, TrainingPass

LOOP = """\
import torch

for x in data:
    out = model(x); loss = out.mean()
    opt.zero_grad()
    loss.backward(); opt.step()
"""


def source_of(text: str) -> PythonSource:
    source = PythonSource.parse("train.py", text.encode())
    assert source is not None
    return source


def frame(text: str, code: str) -> Frame:
    """Where `code` stands in a one-line statement."""
    number = next(n for n, line in enumerate(text.splitlines(), 1) if code in line)
    ends = text.splitlines()[number - 1].index(code) + len(code)
    return Frame(file="train.py", line=number, function="<module>", ends=(number, ends))


def facts() -> ScriptFacts:
    backward, forward = frame(LOOP, "loss.backward()"), frame(LOOP, "model(x)")
    return ScriptFacts(
        device="cpu",
        passes=(TrainingPass(forwards=((forward,),), backward=(backward,)),),
        backward=(backward,),
        step=(frame(LOOP, "opt.step()"),),
    )


def statement(code: str) -> str:
    source, place = source_of(LOOP), frame(LOOP, code)
    found = source.statement_at(place.line, place.ends)
    assert found is not None
    return ast.unparse(found)


def test_of_several_on_a_line_it_is_the_one_that_ran() -> None:
    assert statement("loss.backward()") == "loss.backward()"
    assert statement("opt.step()") == "opt.step()"
    assert statement("model(x)") == "out = model(x)"
    assert statement("out.mean()") == "loss = out.mean()"
    last = source_of(LOOP).statement_at(6)
    assert last is not None
    assert ast.unparse(last) == "opt.step()"  # as long as nobody knows which


def test_backward_beside_the_step_stays_outside_of_autocast() -> None:
    patched = patch_source(facts(), [choose("bf16")], lambda _file: LOOP.encode())
    assert not patched.by_hand
    assert patched.after["train.py"].decode().splitlines()[2:] == [
        "for x in data:",
        '    with torch.autocast("cpu", dtype=torch.bfloat16):',
        "        out = model(x); loss = out.mean()",
        "        opt.zero_grad()",
        "    loss.backward(); opt.step()",
    ]


def test_a_scaler_is_updated_on_the_line_after_both() -> None:
    patched = patch_source(facts(), [choose("fp16")], lambda _file: LOOP.encode())
    assert not patched.by_hand
    assert patched.after["train.py"].decode().splitlines()[-2:] == [
        "    scaler.scale(loss).backward(); scaler.step(opt)",
        "    scaler.update()",
    ]


def test_nothing_is_inserted_into_a_loop_of_one_line() -> None:
    source = source_of("for x in data: a(x); b(x)\n")
    after = source.statement_at(1, (1, 25))
    assert after is not None
    with pytest.raises(NoPlaceError):
        source.insert_after(after, "c()")


def test_after_the_last_of_three() -> None:
    text = "if on:\n    a(); b(); c()\nd()\n"
    source = source_of(text)
    last = source.statement_at(2)
    assert last is not None
    changed = edited([source.insert_after(last, "new()")], lambda _file: text.encode())
    assert changed["train.py"].decode() == "if on:\n    a(); b(); c()\n    new()\nd()\n"


def test_autocast_needs_a_backward_pass_to_end_at() -> None:
    """torch.autograd.grad is none: nobody would leave autocast."""
    known = ScriptFacts(device="cpu", dtypes=("float32",), roots=("Net",))
    assert "no backward pass" in (why_not_autocast(known) or "")


def test_a_trainer_of_transformers_has_an_option_for_it() -> None:
    loader = Built(
        kind="loader",
        type="DataLoader",
        options={},
        given=(),
        frames=(),
        direct=False,
        library="transformers",
    )
    text = "Trainer(model=model).train()\n"
    place = frame(text, "Trainer(model=model).train()")
    known = ScriptFacts(
        device="cpu",
        built=(loader,),
        passes=(TrainingPass(forwards=((place,),), backward=(place,)),),
    )
    patched = patch_source(known, [choose("bf16")], lambda _file: text.encode())
    assert not patched.after
    assert patched.by_hand == ("give TrainingArguments bf16=True: the Trainer runs the model",)
    own = replace(facts(), built=(loader,))  # a loop of the script's own is edited all the same
    assert patch_source(own, [choose("bf16")], lambda _file: LOOP.encode()).after


HOOKS = """\
class Net(Module):
    def __init__(self):
        self.body = make()
    def training_step(self, batch):
        return self.body(batch)
    def fit(self):
        for batch in data:
            self.training_step(batch)
Trainer().fit(Net())
"""


def root_call(*outer: tuple[str, str]) -> RootCall:
    """The body, called in training_step, which these frames lead to: (code, function)."""
    inner = replace(frame(HOOKS, "self.body(batch)"), function="Net.training_step")
    frames = (inner, *(replace(frame(HOOKS, code), function=name) for code, name in outer))
    names = tuple("self.body" if one.function.startswith("Net") else "" for one in frames)
    return RootCall(type="Body", frames=frames, names=names, images=(), torchs_forward=None)


def compiled_after(call: RootCall) -> str:
    """The line before `compile` in the patched source."""
    known = ScriptFacts(device="cpu", roots=("Body",), root_calls=(call,))
    patched = patch_source(known, [choose("compile")], lambda _file: HOOKS.encode())
    lines = patched.after["train.py"].decode().splitlines()
    return lines[lines.index(next(one for one in lines if "compile()" in one)) - 1].strip()


def test_a_hook_that_a_library_calls_in_every_step_is_no_place_to_prepare_a_model() -> None:
    called_back = root_call(("Trainer().fit(Net())", "<module>"))
    assert compiled_after(called_back) == "self.body = make()"


def test_a_loop_of_the_script_s_own_is_such_a_place() -> None:
    own = root_call(("self.training_step(batch)", "Net.fit"))
    assert compiled_after(own) == "def fit(self):"


def test_lightning_has_an_option_for_precision() -> None:
    forward, outside = root_call(("Trainer().fit(Net())", "<module>")).frames
    passes = (TrainingPass(forwards=((forward, outside),), backward=(outside,)),)
    patched = patch_source(
        ScriptFacts(device="cpu", passes=passes), [choose("bf16")], lambda _file: HOOKS.encode()
    )
    assert patched.by_hand == ('give Trainer precision="bf16-mixed": Lightning runs the model',)
