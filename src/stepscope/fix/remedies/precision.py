"""Matmuls in TF32, or forward and loss under autocast to bf16 or fp16.

Autocast begins with the first module that is called and ends when backward begins. Everything
between the two runs under it, the loss too, as if the script's own statements stood in a `with
torch.autocast(...)` block. A torch.autograd.grad that lets the graph go is a backward too, if it is
not inside the module's forward.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

from stepscope.errors import RefusedError
from stepscope.fix.declaration import Fix
from stepscope.fix.proposal import Proposal, Script, set_switches
from stepscope.fix.python_source import Edit, PythonSource
from stepscope.records.script_facts import Frame, ScriptFacts, TrainingPass

if TYPE_CHECKING:
    from stepscope.fix.training_events import Made
    from stepscope.fix.training_process import TrainingProcess

_SWITCHES = {
    "torch.set_float32_matmul_precision()": '"high"',
    "torch.backends.cudnn.allow_tf32": "True",
}
_ELSEWHERE = {
    "torch.backends.cuda.matmul.allow_tf32": "True",
    "torch.backends.cuda.matmul.fp32_precision": '"tf32"',
}
_NEWER = "the script sets precision with torch.backends.*.fp32_precision. Choose tf32 there"


def _why_not_tf32(facts: ScriptFacts, value: str) -> str | None:
    if facts.device != "cuda":
        return "it needs a CUDA device"
    if facts.dtypes and "float32" not in facts.dtypes:
        return "no parameter is fp32"
    if facts.autocast:
        return f"the script's matmuls already run in {facts.autocast}"
    if facts.matmul_precision == "mixed":
        return _NEWER
    if facts.matmul_precision != "highest" and facts.conv_tf32:
        return "the script already uses TF32"
    return None


def _apply_tf32(training: TrainingProcess, value: str) -> None:
    """Switch at the first forward: until then the script may set what it finds."""
    import torch

    tell = training.telling()

    def switch(_module: object) -> None:
        try:
            if torch.get_float32_matmul_precision() == "highest":
                torch.set_float32_matmul_precision("high")
                tell("matmuls use TF32")
            if not torch.backends.cudnn.allow_tf32:
                torch.backends.cudnn.allow_tf32 = True
                tell("convolutions use TF32")
        except RuntimeError:  # torch does not let older and newer switches be used together
            raise RefusedError(_NEWER) from None

    training.when_root(switch)


def _patch_tf32(script: Script, value: str) -> Proposal:
    wanted = dict(_SWITCHES)
    if script.facts.conv_tf32:  # as torch has it by default
        wanted.pop("torch.backends.cudnn.allow_tf32")
    if script.facts.matmul_precision != "highest":
        wanted.pop("torch.set_float32_matmul_precision()")
    return set_switches(script, wanted, others=_ELSEWHERE)


TF32 = Fix(fits=_why_not_tf32, apply=_apply_tf32, patch=_patch_tf32)


def why_not_autocast(facts: ScriptFacts) -> str | None:
    if facts.autocast:
        return f"the script uses autocast itself ({facts.autocast})"
    if facts.dtypes and "float32" not in facts.dtypes:
        return "no parameter is fp32"
    if facts.roots and not facts.passes:
        return (
            "stepscope saw no backward pass after a call of the model, so it does not know where "
            "the loss ends"
        )
    return None


def _enter_until_backward(
    training: TrainingProcess, dtype: str, is_on: Callable[[], bool] = lambda: True
) -> None:
    """Enter autocast in calls with gradients. A model in evaluation mode is left alone once another
    call was in training mode: no backward pass follows such a call."""
    import torch

    tell = training.telling()
    running: list[Any] = []
    modes: set[bool] = set()

    def begin(module: Any, _args: Sequence[Any], _kwargs: dict[str, Any]) -> None:
        modes.add(module.training)
        if running or not is_on() or (not module.training and True in modes):
            return
        device = next(module.parameters()).device.type
        context = torch.autocast(device, dtype=getattr(torch, dtype))
        context.__enter__()
        running.append(context)
        tell(f"forward and loss run under {dtype} autocast")

    def end(_anything: Any) -> None:
        if running:
            running.pop().__exit__(None, None, None)

    def end_or_forget(anything: Any) -> None:
        """Weights may change now, and autocast remembers them: it must not, inside a root's
        forward that goes on."""
        if training.is_in_root:
            torch.clear_autocast_cache()
        else:
            end(anything)

    training.around_root(begin)
    training.before_backward(end)
    training.before_graph_is_freed(end_or_forget)
    training.before_step(end)


_LIGHTNING = {"bf16": "bf16-mixed", "fp16": "16-mixed"}


def _ask_trainer(facts: ScriptFacts, option: str) -> Proposal | None:
    """Say what to tell a trainer of transformers or Lightning, if one runs the model: no statement
    of the script does."""
    if any(built.library == "transformers" for built in facts.built):
        words = f"give TrainingArguments {option}=True: the Trainer runs the model"
        return Proposal(by_hand=(words,))
    forwards = [frame for one in facts.passes for frames in one.forwards for frame in frames]
    if any(frame.function.endswith(".training_step") for frame in forwards):
        words = f'give Trainer precision="{_LIGHTNING[option]}": Lightning runs the model'
        return Proposal(by_hand=(words,))
    return None


class _ForwardStatements(NamedTuple):
    """The statements of one block that make a loss, and the one after them that starts backward."""

    source: PythonSource
    first: ast.stmt
    last: ast.stmt
    backward: ast.stmt


def wrap_forward(script: Script, dtype: str) -> Proposal:
    """Put the statements from the forward to the one before backward under autocast."""
    header = f'with torch.autocast("{script.facts.device}", dtype=torch.{dtype}):'
    proposal = Proposal()
    for one in script.facts.passes:
        found = _statements_of_forward(script, one)
        if found is None or _has_autocast(found):
            where = f" (backward starts at {one.backward[0].words})" if one.backward else ""
            proposal += Proposal(
                by_hand=(f"put the forward pass and the loss under `{header}`{where}",)
            )
        else:
            source = found.source
            edits = (*source.ensure_import("torch"), *source.wrap(found.first, found.last, header))
            proposal += Proposal(edits=edits)
    return proposal


def _statements_of_forward(script: Script, one: TrainingPass) -> _ForwardStatements | None:
    """Search the innermost block that both the forward and backward are called from."""
    for frame, source, statement in script.statements(one.backward):
        for end in (statement, *_statements_around(source, statement)):
            block = source.block_of(end)
            before = block[: block.index(end)]
            for frames in one.forwards:
                first = _leading_to(before, frames, frame)
                if first and source.has_lines_of_its_own(first, before[-1]):
                    return _ForwardStatements(source, first, before[-1], end)
    return None


def _statements_around(source: PythonSource, statement: ast.stmt) -> Iterator[ast.stmt]:
    """Yield those of the same function, innermost first."""
    for node in source.parents_of(statement):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return
        if isinstance(node, ast.stmt):
            yield node


def _leading_to(
    block: Sequence[ast.stmt], frames: Sequence[Frame], other: Frame
) -> ast.stmt | None:
    """Return the statement that leads to the forward, in the same function as `other`."""
    lines = [f.line for f in frames if (f.file, f.function) == (other.file, other.function)]
    for statement in block:
        if lines and statement.lineno <= lines[0] <= (statement.end_lineno or statement.lineno):
            return statement
    return None


def _has_autocast(found: _ForwardStatements) -> bool:
    """A block of the script's own, switched off perhaps, would have its way inside ours."""
    source = found.source
    around = [node for node in source.parents_of(found.backward) if isinstance(node, ast.With)]
    headers = [item.context_expr for node in around for item in node.items]
    block = source.block_of(found.backward)
    inside = block[block.index(found.first) : block.index(found.backward)]
    return any(
        isinstance(node, ast.Call) and source.called(node) == "autocast"
        for part in (*headers, *inside)
        for node in ast.walk(part)
    )


def _why_not_bf16(facts: ScriptFacts, value: str) -> str | None:
    if facts.bf16 is False:
        device = "CPU" if facts.device == "cpu" else "GPU"
        return f"this {device} has no instructions for bf16 matmuls"
    if facts.of_kind("scaler"):
        return "the script has its own GradScaler, which bf16 does not need"
    return why_not_autocast(facts)


def _patch_bf16(script: Script, value: str) -> Proposal:
    proposal = wrap_forward(script, "bfloat16")
    return _ask_trainer(script.facts, "bf16") or proposal if proposal.by_hand else proposal


BF16 = Fix(
    fits=_why_not_bf16,
    apply=lambda training, _value: _enter_until_backward(training, "bfloat16"),
    patch=_patch_bf16,
)


# A GradScaler for a script that has none: fp16 gradients would underflow without it.
#
# The loss is scaled when backward begins. Gradients are unscaled before they are clipped, at the
# latest when the optimizer steps; a step with infinite gradients is skipped.


class _LossScaling:
    """For one optimizer. Once refused, the script trains on as if nothing had been injected."""

    def __init__(self, training: TrainingProcess) -> None:
        self.is_on = True
        self._tell, self._refuse = training.telling(), training.refusing()
        self._optimizer: Any = None
        self._scaler: Any = None
        self._building = False
        self._stepping = False
        self._scaled = False  # the gradients now are
        self._backward_ran = False  # since the last step
        training.after_building("scaler", self._scaler_built)
        training.after_building("optimizer", self._optimizer_built)
        training.before_backward(self._scale)
        training.before_clipping(self._unscale)
        training.before_step(self._before_any_step)

    def _give_up(self, why: str, *others: Any) -> None:
        """Gradients that are scaled now are unscaled by hand, those of `others` too."""
        self._refuse(why)
        self.is_on = False
        if self._scaled:
            scale = self._scaler.get_scale()
            for parameter in _parameters_of([self._optimizer, *others]):
                if parameter.grad is not None:
                    parameter.grad.div_(scale)
            self._scaled = False

    def _scaler_built(self, _made: Made) -> None:
        if not self._building:
            self._give_up("the script has its own GradScaler")

    def _optimizer_built(self, made: Made) -> None:
        import torch

        if self._optimizer is not None:
            self._give_up("the script has several optimizers")
            return
        if any(p.dtype == torch.float16 for p in _parameters_of([made.object])):
            self._give_up("parameters are fp16, so their gradients cannot be unscaled")
            return
        self._optimizer = made.object
        original = made.object.step

        def step(_optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self._wants_step(args, kwargs):
                return self._step()
            return original(*args, **kwargs)

        made.object.step = MethodType(step, made.object)  # schedulers expect a method

    def _scale(self, outputs: Any) -> Any:
        if not self.is_on or self._optimizer is None:
            return None
        import torch

        if self._scaler is None:
            device = next(_parameters_of([self._optimizer])).device.type
            self._building = True
            self._scaler = torch.amp.GradScaler(device)
            self._building = False
            self._tell("the loss is scaled by a GradScaler")
        with torch.enable_grad():
            scaled = self._scaler.scale(outputs)
        self._scaled = self._backward_ran = True
        return scaled

    def _unscale(self) -> None:
        if self._scaled and self._has_gradients():
            self._scaler.unscale_(self._optimizer)
            self._scaled = False

    def _wants_step(self, args: Any, kwargs: Any) -> bool:
        """Whether this call of optimizer.step goes through the scaler."""
        if self._stepping or not self.is_on:
            return False
        if any(value is not None for value in (*args, *kwargs.values())):
            self._give_up("the optimizer computes the loss in a closure")
            return False
        return self._backward_ran and self._has_gradients()

    def _step(self) -> Any:
        self._stepping = True
        try:
            result = self._scaler.step(self._optimizer)
        finally:
            self._stepping = False
        self._scaler.update()
        self._scaled = self._backward_ran = False
        return result

    def _before_any_step(self, optimizer: Any) -> None:
        """An optimizer that is none of torch's was not seen when it was built."""
        if self.is_on and optimizer is not self._optimizer:
            self._give_up(f"{type(optimizer).__name__} steps, which is not torch's own", optimizer)

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for p in _parameters_of([self._optimizer]))


def _parameters_of(optimizers: Iterable[Any]) -> Any:
    """Each once."""
    groups = [group for one in optimizers if one is not None for group in one.param_groups]
    return iter({id(p): p for group in groups for p in group["params"]}.values())


_BY_HAND = (
    "run forward and loss under fp16 autocast with a GradScaler: call "
    "scaler.scale(loss).backward() and scaler.step(optimizer), then scaler.update(). Before "
    "gradients are clipped, call scaler.unscale_(optimizer)"
)


class _MethodCall(NamedTuple):
    """`receiver.method()` in the source."""

    call: ast.Call
    receiver: ast.expr


def _why_not_fp16(facts: ScriptFacts, value: str) -> str | None:
    if facts.device != "cuda":
        return "it needs a CUDA device"
    if facts.of_kind("scaler"):
        return "the script has its own GradScaler"
    if len(facts.of_kind("optimizer")) != 1:
        return f"it needs one torch optimizer, but the script has {len(facts.of_kind('optimizer'))}"
    if facts.closure:
        return "the optimizer computes the loss in a closure"
    if "float16" in facts.dtypes:
        return "parameters are fp16, so their gradients cannot be unscaled"
    if any(name.startswith(("FSDP", "FullySharded")) for name in facts.modules):
        return "sharded gradients need FSDP's own scaler"
    return why_not_autocast(facts)


def _apply_fp16(training: TrainingProcess, value: str) -> None:
    scaling: list[_LossScaling] = []
    _enter_until_backward(training, "float16", lambda: scaling[0].is_on)
    scaling.append(_LossScaling(training))  # after autocast: the scaled loss is outside of it


def _patch_fp16(script: Script, value: str) -> Proposal:
    autocast = wrap_forward(script, "float16")
    scaling = _scaling_edits(script)
    if autocast.by_hand or scaling is None:
        return _ask_trainer(script.facts, "fp16") or Proposal(by_hand=(_BY_HAND,))
    return autocast + Proposal(edits=scaling)


def _scaling_edits(script: Script) -> tuple[Edit, ...] | None:
    """None where a place was not found: half of it would train badly."""
    facts = script.facts
    found = script.source_of(facts.step[:1])
    backwards = [one.backward[:1] for one in facts.passes]
    if found is None or not all(f and f[0].file == found[1].file for f in backwards):
        return None
    source, frame = found
    name = "grad_scaler" if _uses(source, "scaler") else "scaler"
    step = _method_call(source, frame, "step")
    losses = [_method_call(source, frames[0], "backward") for frames in backwards]
    if step is None or not losses or any(call is None for call in losses):
        return None
    optimizer = source.segment(step.receiver)
    clip = list(_unscale_before_clipping(source, facts.clip, frame, name, optimizer))
    if facts.clip and not clip:
        return None
    statement = source.statement_at(frame.line, frame.ends)
    assert statement is not None
    scaler = f'{name} = torch.amp.GradScaler("{facts.device}")'
    return (
        *source.ensure_import("torch"),
        source.insert_after_imports(scaler),
        *(
            edit
            for call in losses
            if call is not None
            for edit in source.surround(call.receiver, f"{name}.scale(", ")")
        ),
        *clip,
        source.replace(step.call, f"{name}.step({optimizer})"),
        source.insert_after(statement, f"{name}.update()"),
    )


def _method_call(source: PythonSource, frame: Frame, method: str) -> _MethodCall | None:
    """Without positional arguments, and a statement of its own."""
    statement = source.statement_at(frame.line, frame.ends)
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.args:
        return None
    if call.func.attr != method or (method == "step" and call.keywords):
        return None
    return _MethodCall(call, call.func.value)


def _unscale_before_clipping(
    source: PythonSource, clip: Sequence[Frame], step: Frame, name: str, optimizer: str
) -> Iterator[Edit]:
    """In the function that steps, where the optimizer has the same name."""
    for frame in clip:
        if (frame.file, frame.function) == (step.file, step.function):
            statement = source.statement_at(frame.line, frame.ends)
            if statement is not None and source.starts_line(statement):
                yield source.insert_before(statement, f"{name}.unscale_({optimizer})")
            return


def _uses(source: PythonSource, name: str) -> bool:
    return any(
        (isinstance(node, ast.Name) and node.id == name)
        or (isinstance(node, ast.arg) and node.arg == name)
        for node in ast.walk(source.tree)
    )


FP16 = Fix(fits=_why_not_fp16, apply=_apply_fp16, patch=_patch_fp16)
