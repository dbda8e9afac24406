"""What a change would save: the step's graph, edited and replayed. engine.py is the way in."""
