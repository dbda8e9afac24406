"""The server's promises over random histories with injected faults."""

from __future__ import annotations

import asyncio
import random

import pytest
from server_history_checker import HistoryChecker
from simulated_server import RANKS, Faults, SimulatedServer, run_in_virtual_time

STEPS = 6


async def live_through(server: SimulatedServer, chance: random.Random) -> None:
    """Workers train, die anywhere and come back; shards die; checkpoints are taken."""
    await server.start()
    faults = server.network.faults
    paces = [chance.choice((0.1, 0.3, 2.0)) for _ in range(RANKS)]
    lives = [asyncio.ensure_future(server.train(rank, STEPS, paces[rank])) for rank in range(RANKS)]

    async def kill_a_worker() -> None:
        await asyncio.sleep(chance.random() * 15)
        rank = chance.randrange(RANKS)
        lives[rank].cancel()
        await asyncio.sleep(chance.choice((0.0, 60.0)))  # before, or after it is missed
        lives[rank] = asyncio.ensure_future(server.train(rank, STEPS, paces[rank]))

    async def kill_a_shard() -> None:
        await asyncio.sleep(chance.random() * 15)
        alive = sorted(set(server.servers) - server.network.dead)
        server.network.kill(chance.choice(alive))

    async def take_checkpoints() -> None:
        for _ in range(2):
            await asyncio.sleep(chance.random() * 8)
            await server.checkpoint()

    troubles = [take_checkpoints()]
    troubles += [kill_a_worker() for _ in range(faults.worker_kills)]
    troubles += [kill_a_shard() for _ in range(faults.shard_kills)]
    await asyncio.gather(*troubles)
    await asyncio.gather(*lives, return_exceptions=True)
    await asyncio.sleep(120)  # until everyone who died is evicted
    await server.read_final()
    for life in lives:
        if not life.cancelled():
            life.result()


def random_history(seed: int, consistency: str, replicas: int) -> SimulatedServer:
    chance = random.Random(seed)
    faults = Faults(
        lost=chance.choice((0.0, 0.03)),
        repeated=chance.choice((0.0, 0.2)),
        delay_s=chance.choice((0.01, 0.3)),
        worker_kills=chance.randrange(3),
        shard_kills=chance.randrange(3),
        slow_shard=chance.choice((None, None, 0, 1)),
        slow_s=0.2,
    )
    server = SimulatedServer(
        consistency,
        seed=seed,
        faults=faults,
        replicas=replicas,
        queue_limit=chance.choice((2, 64)),
    )
    run_in_virtual_time(live_through(server, chance))
    HistoryChecker(server.history, server.consistency).check()
    return server


@pytest.mark.parametrize("consistency", ["strong", "bounded:1", "bounded:3", "eventual"])
@pytest.mark.parametrize("replicas", [0, 1])
def test_promises_hold_over_random_histories(consistency: str, replicas: int) -> None:
    for seed in range(25):
        random_history(seed, consistency, replicas)
