"""What torch.compile would make of an eager step: fused loops, convolutions' layout, host time."""

from stepscope.predict.compiling.compiled_step import CompiledStep, compile_step

__all__ = ["CompiledStep", "compile_step"]
