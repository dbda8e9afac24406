"""One rank's capture from its first step to its end: counting steps, opening what is due,
writing the rank's files.
"""
