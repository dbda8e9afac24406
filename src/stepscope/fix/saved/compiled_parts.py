"""Which parts of a model torch.compile has taken."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.fix.compiled_modules import is_compiled

if TYPE_CHECKING:
    import torch

    from stepscope.fix.saved.step_record import StepRecord

COMPILED_PART = (
    "part of the model is compiled ({part}), so everything stays saved. Compile the whole "
    "model and call save_memory(model, reduce=0.5) on that. Or call save_memory on the parts "
    "that are not compiled"
)
_COMPILED_NODE = "CompiledFunctionBackward"


def compiled_part(model: torch.nn.Module) -> str | None:
    """The first compiled module; None where all is eager."""
    return next((name for name, module in model.named_modules() if is_compiled(module)), None)


def ran_compiled_code(record: StepRecord) -> bool:
    """Also of a compiled function that no module shows."""
    return any(use.consumer.startswith(_COMPILED_NODE) for use in record.uses)
