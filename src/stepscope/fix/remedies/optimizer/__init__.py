"""The optimizer's step in fewer kernels."""
