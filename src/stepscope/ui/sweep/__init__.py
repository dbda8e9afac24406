"""`stepscope sweep`: one program with many settings, trained in arrays of models."""
