"""What launching a CUDA graph costs, as measured on an H200."""

SPACING_NS = 1_000.0  # between kernels of a graph
LAUNCH_NS = 30_000.0  # of the host, per graph
PER_NODE_NS = 60.0
# Of a compiled graph: seven models took their kernels' time and 0 to 0.3 us for each.
COMPILED_SPACING_NS = 300.0
