"""The user's command as a job: started, watched to its end, captured into a run folder, and
its parts from several hosts brought together.
"""
