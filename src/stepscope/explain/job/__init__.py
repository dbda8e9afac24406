"""All ranks together: who waits for whom, which rank, host or link is slow, and what decides
a step.
"""
