"""The host's threads, cores, allocator and arithmetic."""
