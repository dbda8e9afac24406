"""Other kernels for the same operators."""
