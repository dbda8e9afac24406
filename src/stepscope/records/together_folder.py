"""Where a parameter server's records lie in the run folder; records/together.py says what they are.

On its own because every reader of run folders needs it, and the records take long to import.
"""

FOLDER = "together"
SERVER_FILE = "server.json"
COORDINATOR_FILE = "coordinator.jsonl"
