"""The process that reads and predicts for `serve`: started by it, never imported by it."""
