"""What filled the memory: from a capture, from a trace's allocator events, or from a snapshot."""
