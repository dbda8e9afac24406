"""What a change would save: the step's graph (explain/replay), edited and replayed.

From what everything stands on to what users call:

optimizer_updates.py which rule and form the step's optimizer has
"""
