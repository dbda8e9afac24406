"""Samples as many small objects that refer to each other: the garbage collector walks them all.

Argument: itself (Python decides when to collect), or by_hand (gc.collect every 20 steps).
"""

import collections
import gc
import sys
import time

import torch
from own_clock import OwnClock
from torch import nn

STEPS, NODES = 400, 1500
BY_HAND = sys.argv[1:] == ["by_hand"]


class Node:
    def __init__(self, parent, number):
        self.parent, self.children, self.facts = parent, [], {"number": number}
        if parent is not None:
            parent.children.append(self)


def tree(nodes):
    root = Node(None, 0)
    for number in range(nodes):
        Node(root, number)
    return root


def time_collections(clock):
    began = [0.0]

    def collection(phase, facts):
        if phase == "start":
            began[0] = time.perf_counter()
        elif facts["generation"] == 2:  # the others are short, and part of every step
            clock.add(time.perf_counter() - began[0])

    gc.callbacks.append(collection)


def main():
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(64, 256)
    corpus = [tree(100) for _ in range(800)]
    recent = collections.deque(maxlen=40)
    gc.collect()
    clock = OwnClock()
    time_collections(clock)
    for number in range(STEPS):
        recent.append(tree(NODES))
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.step()
        if BY_HAND and number % 20 == 19:
            gc.collect()
    clock.say(collections=gc.get_stats()[2]["collections"], corpus=len(corpus))


if __name__ == "__main__":
    main()
