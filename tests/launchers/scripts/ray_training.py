"""Ray Train on two workers, one of which dies once. Arguments: run folder, folder for losses."""

import os
import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import stepscope
import stepscope.ray

OUT, LOSSES = sys.argv[1:]


def train(config):
    import torch
    import torch.distributed as dist
    from ray.train.torch import prepare_model
    from torch import nn

    torch.set_num_threads(1)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = prepare_model(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)))
    optimizer = torch.optim.Adam(model.parameters())
    died = Path(config["losses"]) / "died"
    with (Path(config["losses"]) / str(rank)).open("w") as file:
        for step in range(18):
            if step == 15 and rank == 1 and not died.exists():
                died.touch()
                os._exit(9)
            loss = model(torch.randn(16, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            file.write(f"{rank} {loss.item().hex()}\n")


ray.init(num_cpus=3, include_dashboard=False)
with stepscope.ray.capture(OUT, runtime_env={"env_vars": {"MINE": "kept"}}) as run:
    assert run.runtime_env["env_vars"]["MINE"] == "kept"
    settings = RunConfig(
        name="train",
        storage_path=f"{LOSSES}/results",
        worker_runtime_env=run.runtime_env,
        failure_config=FailureConfig(max_failures=1),
    )
    trainer = TorchTrainer(
        train,
        train_loop_config={"losses": LOSSES},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=settings,
        torch_config=TorchConfig(backend="gloo"),
    )
    trainer.fit()
ray.shutdown()
