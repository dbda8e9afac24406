"""How DistributedDataParallel exchanges gradients and buffers."""
