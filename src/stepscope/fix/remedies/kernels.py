"""Better kernels for the same model: channels last, cuDNN's fastest algorithms, torch.compile."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stepscope.fix.declaration import Fix
from stepscope.fix.model_structure import is_compiled, torchs_forward
from stepscope.fix.proposal import (
    Proposal,
    Script,
    add_before_training,
    import_where_edited,
    set_switches,
    submodule,
)
from stepscope.fix.python_source import Edit, PythonSource
from stepscope.records.script_facts import Built, RootCall, ScriptFacts

if TYPE_CHECKING:
    from stepscope.fix.training_events import Made
    from stepscope.fix.training_process import TrainingProcess


_FORMATS = {4: "channels_last", 5: "channels_last_3d"}  # by the number of dimensions


def _why_not_channels_last(facts: ScriptFacts, value: str) -> str | None:
    if not facts.convolves:
        return "no module is a convolution"
    if not facts.image_inputs:
        return "no model is given images (floating tensors of four or five dimensions)"
    if len(_kinds(facts)) != 1:
        return "the models have convolutions of images and of volumes, and no format fits both"
    return None


def _kinds(facts: ScriptFacts) -> set[int]:
    """The numbers of dimensions that convolutions work on."""
    found = set()
    for name in facts.modules:
        if "conv" in name.lower():
            found |= {4} if "2d" in name.lower() else {5} if "3d" in name.lower() else set()
    return found


def _format(facts: ScriptFacts) -> str:
    return f"torch.{_FORMATS[next(iter(_kinds(facts)), 4)]}"


def _apply_channels_last(training: TrainingProcess, value: str) -> None:
    """DDP copies the layout of parameters into its buckets, so they are converted before it."""
    tell = training.telling()

    def convert_model(module: Any) -> None:
        if _convert_parameters(module):
            tell(f"{type(module).__name__}: channels last")

    def convert_wrapped(made: Made) -> None:
        convert_model(made.value("module"))

    def convert_inputs(
        _module: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        return (
            tuple(_converted(value) for value in args),
            {name: _converted(value) for name, value in kwargs.items()},
        )

    training.before_building("ddp", convert_wrapped)
    training.when_root(convert_model)
    training.around_root(convert_inputs)


def _convert_parameters(module: Any) -> bool:
    """As Module.to(memory_format=...) does, which keeps the parameters themselves."""
    dims = {p.dim() for p in module.parameters()} & set(_FORMATS)
    if len(dims) != 1:
        return False
    import torch

    module.to(memory_format=getattr(torch, _FORMATS[dims.pop()]))
    return True


def _converted(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() in _FORMATS:
        return value.to(memory_format=getattr(torch, _FORMATS[value.dim()]))
    return value


def _patch_channels_last(script: Script, value: str) -> Proposal:
    facts = script.facts
    conversion = f".to(memory_format={_format(facts)})"
    wrapped = facts.of_kind("ddp")
    proposal = Proposal()
    for built in wrapped:
        proposal += _convert_before_ddp(script, built, conversion)
    if not wrapped:
        proposal += add_before_training(script, lambda name, _call: (f"{name}{conversion}",))
    for call in facts.root_calls:
        proposal += _convert_arguments(script, call, conversion)
    return import_where_edited(script, proposal, "torch")


def _convert_before_ddp(script: Script, built: Built, conversion: str) -> Proposal:
    found = script.building_call(built)
    if found is not None:
        source, call = found
        named = [keyword.value for keyword in call.keywords if keyword.arg == "module"]
        given = [*call.args, *named]
        if given:
            return Proposal(edits=_call_on(source, given[0], conversion))
    return Proposal(by_hand=(f"before DDP is built: model{conversion}",))


def _convert_arguments(script: Script, call: RootCall, conversion: str) -> Proposal:
    """The images that a model is given, where it is called."""
    if not call.images:
        return Proposal()
    frame, name = call.frames[0], call.names[0].rpartition(".")[2]
    source = script.source(frame.file)
    found = source.call_at(frame.line, name, frame.ends) if source is not None else None
    if source is not None and found is not None:
        arguments = [_argument(found, image) for image in call.images]
        if all(argument is not None for argument in arguments):
            edits = [_call_on(source, argument, conversion) for argument in arguments if argument]
            return Proposal(edits=tuple(edit for pair in edits for edit in pair))
    return Proposal(by_hand=(f"at {frame.words}: give {call.type} its images as x{conversion}",))


def _argument(call: ast.Call, name: str) -> ast.expr | None:
    """By position or name; None where a starred argument hides it."""
    if name.isdigit():
        before = call.args[: int(name) + 1]
        hidden = len(before) <= int(name) or any(isinstance(a, ast.Starred) for a in before)
        return None if hidden else before[-1]
    return next((k.value for k in call.keywords if k.arg == name), None)


def _call_on(source: PythonSource, expression: ast.expr, call: str) -> tuple[Edit, ...]:
    """`call`, such as `.to(...)`, of an expression."""
    simple = (ast.Name, ast.Attribute, ast.Subscript, ast.Call)
    if isinstance(expression, simple):
        return source.surround(expression, "", call)[1:]
    return source.surround(expression, "(", f"){call}")


CHANNELS_LAST = Fix(
    fits=_why_not_channels_last, apply=_apply_channels_last, patch=_patch_channels_last
)


def _why_not_cudnn_benchmark(facts: ScriptFacts, value: str) -> str | None:
    if facts.device != "cuda":
        return "it needs a CUDA device"
    if not facts.convolves:
        return "no module is a convolution"
    if facts.cudnn_benchmark:
        return "the script has it on already"
    if facts.deterministic:
        return "the script asks for deterministic algorithms"
    return None


def _apply_cudnn_benchmark(training: TrainingProcess, value: str) -> None:
    """At the first forward: until then the script may set what it finds."""
    import torch

    tell = training.telling()

    def switch(_module: object) -> None:
        if not torch.backends.cudnn.benchmark:
            torch.backends.cudnn.benchmark = True
            tell("cuDNN times its algorithms and keeps the fastest")

    training.when_root(switch)


def _patch_cudnn_benchmark(script: Script, value: str) -> Proposal:
    return set_switches(script, {"torch.backends.cudnn.benchmark": "True"})


CUDNN_BENCHMARK = Fix(
    fits=_why_not_cudnn_benchmark, apply=_apply_cudnn_benchmark, patch=_patch_cudnn_benchmark
)


_MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs")


def _why_not_compile(facts: ScriptFacts, value: str) -> str | None:
    if facts.compiled:
        return "the script compiles its model already"
    if not facts.roots:
        return "stepscope saw no call of a model"
    if facts.no_compiler:
        return facts.no_compiler
    if value == "reduce-overhead" and facts.device != "cuda":
        return "it captures CUDA graphs, so it needs a CUDA device"
    return None


def _apply_compile(training: TrainingProcess, value: str) -> None:
    import torch

    tell = training.telling()

    def compile_in_place(module: Any) -> None:
        if any(is_compiled(part) for part in module.modules()):
            return
        mode = {} if value == "default" else {"mode": value}
        path = torchs_forward(module)
        if path is None:
            module.compile(**mode)
        else:
            inner = module.get_submodule(path)
            inner.forward = torch.compile(inner.forward, **mode)
        tell(f"{type(module).__name__}: {_compile_line('model', path, value)}")

    training.when_root(compile_in_place)


def _compile_line(name: str, path: str | None, value: str) -> str:
    mode = "" if value == "default" else f'mode="{value}"'
    if path is None:
        return f"{name}.compile({mode})"
    forward = f"{submodule(name, path)}.forward"
    return f"{forward} = torch.compile({', '.join(filter(None, (forward, mode)))})"


def _patch_compile(script: Script, value: str) -> Proposal:
    proposal = add_before_training(
        script, lambda name, call: (_compile_line(name, call.torchs_forward, value),)
    )
    if all(call.torchs_forward is None for call in script.facts.root_calls):
        return proposal
    return import_where_edited(script, proposal, "torch")


COMPILE = Fix(
    fits=_why_not_compile,
    apply=_apply_compile,
    patch=_patch_compile,
    accepts=lambda value: value in _MODES,
)
