"""Cost models, and, to come, the step as a graph that can be edited and replayed.

alpha_beta.py   how long a collective takes: latency and bandwidth fitted to a sweep
algorithms.py   ring, tree and halving-doubling, compared
"""
