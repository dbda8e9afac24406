"""Steps, verdict and budget where people already look: TensorBoard, MLflow, Weights & Biases."""
