"""Workloads to run stepscope on. Started as programs of their own; nothing imports them."""
