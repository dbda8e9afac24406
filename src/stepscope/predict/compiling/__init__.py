"""What torch.compile would make of an eager step: fused loops, convolutions' layout, host time."""
