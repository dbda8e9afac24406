"""DistributedDataParallel over gloo, with the rank from whichever launcher started it.

Options: STEPS steps (18), with a pause of MS milliseconds; rank FAILS exits with 5 after half of
them. SIGUSR1 is counted, as by a training that saves a checkpoint before its time is up.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

options = dict(word.split("=") for word in sys.argv[1:])
names = [("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")]
names.append(("SLURM_PROCID", "SLURM_NTASKS"))
rank, world = next(
    (int(os.environ[own]), int(os.environ[all_of])) for own, all_of in names if own in os.environ
)
steps, pause_s = int(options.get("STEPS", 18)), int(options.get("MS", 0)) / 1000

signal.signal(signal.SIGUSR1, lambda *_: print(f"SIGUSR1 in {rank}\n", end="", flush=True))
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=world)
torch.manual_seed(rank)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)))
optimizer = torch.optim.Adam(model.parameters())
for step in range(steps):
    loss = model(torch.randn(16, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{rank} {loss.item().hex()}\n", end="", flush=True)
    if options.get("FAILS") == str(rank) and step == steps // 2:
        os._exit(5)
    time.sleep(pause_s)
dist.destroy_process_group()
