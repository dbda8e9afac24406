"""Steps, verdict and budget where people already look: TensorBoard, MLflow, Weights & Biases.

metric_log.py       what each of the three can do, and how the command line names it
tensorboard.py, mlflow.py, wandb.py  one of them each; their packages are imported when used
step_points.py      steps -> points along the run, few enough for any dashboard
conclusion.py       an explanation -> values and a text
run_log.py          follows a run folder in a thread and logs it; a failure is said, never raised
"""
