"""The profiler's windows, when they open, and the stack sampler that runs outside of them."""
