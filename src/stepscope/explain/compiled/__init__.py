"""What torch.compile did, and what its graphs, breaks and compilations cost."""
