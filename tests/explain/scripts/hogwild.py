"""Two processes that train one model in shared memory, without a process group."""

import torch
import torch.multiprocessing as mp


def train(seed: int, model: torch.nn.Module) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(18):
        optimizer.zero_grad()
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    model = torch.nn.Linear(64, 64)
    model.share_memory()
    mp.spawn(train, (model,), nprocs=2)
