"""Notice, in the training process, that steps no longer end, and record what every thread does."""
