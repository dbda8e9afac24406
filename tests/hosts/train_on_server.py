"""A training on a parameter server over two Ray nodes whose parameters are ledgers.

    train_on_server.py ADDRESS RUN STEPS

Each push adds one to a number of its own, so that the final parameters list the updates in them.
Two workers run on every node. Prints one JSON object at the end.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from stepscope.fix.server import ParameterServer

RANKS, LIVES, CLOCKS = 4, 6, 200


def ledgers() -> dict[str, torch.Tensor]:
    return {f"ledger{shard}": torch.zeros(RANKS, LIVES, CLOCKS) for shard in range(2)}


class LedgerTrainer:
    def train(self, server: Any, rank: int, steps: int) -> list[list[int]]:
        model = {name: torch.nn.Parameter(one) for name, one in ledgers().items()}
        acked = []
        with server.worker(model, rank) as worker:
            for _ in range(steps):
                worker.pull()
                me = [rank, worker._client.joined.life, worker.clock]
                for parameter in model.values():
                    parameter.grad = torch.zeros_like(parameter)
                    parameter.grad[tuple(me)] = -1.0
                time.sleep(0.2)
                if worker.push():
                    acked.append(me)
        return acked


def main(address: str, run: str, steps: int) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address=address, namespace="stepscope", log_to_driver=False)
    state = ledgers()
    with ParameterServer(
        state,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        shards=2,
        replicas=1,
        consistency="bounded:2",
        workers=RANKS,
        worker_deadline_s=8.0,
        shard_deadline_s=8.0,
        run=run,
    ) as server:
        nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
        trainer = ray.remote(LedgerTrainer)
        jobs = []
        for rank in range(RANKS):
            where = NodeAffinitySchedulingStrategy(node_id=nodes[rank % len(nodes)], soft=False)
            actor = trainer.options(num_cpus=0, memory=1, scheduling_strategy=where).remote()
            jobs.append((actor, actor.train.remote(server, rank, steps)))
        acked, lost = [], []
        for rank, (_, job) in enumerate(jobs):
            try:
                acked += ray.get(job)
            except ray.exceptions.RayError as error:
                lost.append([rank, type(error).__name__])
        state = server.state_dict()
    final = {name: one.nonzero().tolist() for name, one in state.items()}
    twice = sum(int((one > 1).sum()) for one in state.values())
    end = {"acked": acked, "lost": lost, "final": final, "twice": twice}
    sys.stdout.write(json.dumps(end) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
