"""The server's promises over random histories with injected faults."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from server_history_checker import HistoryChecker
from simulated_server import (
    CLOCKS,
    LIVES,
    RANKS,
    Faults,
    History,
    SimulatedServer,
    run_in_virtual_time,
)

from stepscope.fix.server.membership import (
    LostUpdates,
    MemberChange,
    PullServed,
    ShardRestored,
    UpdateApplied,
)
from stepscope.fix.server.messages import GradientPacker
from stepscope.fix.server.shard_state import ShardState
from stepscope.records.change_values import Consistency

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
        lives[rank].cancel()  # another kill may have brought it back: one process for each rank
        lives[rank] = asyncio.ensure_future(server.train(rank, STEPS, paces[rank]))

    async def kill_a_shard() -> None:
        await asyncio.sleep(chance.random() * 15)
        alive = sorted(set(server.servers) - server.network.dead)
        server.network.kill(chance.choice(alive))

    async def cut_a_link() -> None:
        await asyncio.sleep(chance.random() * 15)
        worker = f"worker-{chance.randrange(RANKS)}"
        server.network.cut_off.add(worker)
        await asyncio.sleep(chance.choice((2.0, 60.0)))
        server.network.cut_off.discard(worker)

    async def take_checkpoints() -> None:
        for _ in range(2):
            await asyncio.sleep(chance.random() * 8)
            await server.checkpoint()

    troubles = [take_checkpoints()]
    troubles += [kill_a_worker() for _ in range(faults.worker_kills)]
    troubles += [kill_a_shard() for _ in range(faults.shard_kills)]
    troubles += [cut_a_link() for _ in range(faults.cut_links)]
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
        cut_links=chance.randrange(2),
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


MODES = ["strong", "bounded:1", "bounded:3", "eventual", "weak:2"]


@pytest.mark.parametrize("consistency", MODES)
def test_promises_hold_over_random_histories(consistency: str) -> None:
    for seed in range(2):
        for replicas in (0, 1):
            random_history(seed, consistency, replicas)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize("consistency", MODES)
def test_promises_hold_over_two_hundred_random_histories(consistency: str, replicas: int) -> None:
    for seed in [*range(100, 118), 1016, 1028, 1029]:
        random_history(seed, consistency, replicas)


def many_histories(consistency: str, replicas: int) -> None:
    for seed in range(10):
        random_history(seed, consistency, replicas)


# The checker itself: it must see what is broken.


def without_deduplication(self: ShardState, message) -> object:
    self.counts[message.member] = message.clock
    return _PUSH(self, message)


_PUSH = ShardState._push


def test_the_checker_sees_a_server_that_applies_repeated_pushes(monkeypatch) -> None:
    monkeypatch.setattr(ShardState, "_push", without_deduplication)
    with pytest.raises(AssertionError, match="applied twice"):
        many_histories("eventual", 0)


def test_the_checker_sees_a_server_that_admits_everybody(monkeypatch) -> None:
    monkeypatch.setattr("stepscope.fix.server.membership.ClockTable.blockers", lambda *_: [])
    with pytest.raises(AssertionError, match="without update"):
        many_histories("bounded:1", 1)


def test_the_checker_sees_a_loss_that_is_not_announced(monkeypatch) -> None:
    monkeypatch.setattr("stepscope.fix.server.membership.lost_updates", lambda *_: ())
    with pytest.raises(AssertionError, match=r"without a word|does not read its own"):
        many_histories("eventual", 0)


def one_read(ledgers: dict[int, np.ndarray], events: list[object], kind: str = "final") -> History:
    history = History()
    for event in events:
        history.add("event" if not isinstance(event, tuple) else "acked", event)
    history.add(kind, ledgers)
    return history


def ledger(*updates: tuple[int, int, int]) -> np.ndarray:
    whole = np.zeros((RANKS, LIVES, CLOCKS))
    for update in updates:
        whole[update] = 1.0
    return whole


def test_the_checker_sees_an_update_that_only_one_shard_has() -> None:
    torn = one_read({0: ledger((1, 0, 0)), 1: ledger()}, [])
    with pytest.raises(AssertionError, match="only on some shards"):
        HistoryChecker(torn, Consistency.parse("eventual")).check()
    said = MemberChange(change="evicted", worker=1, life=0, clock=0, at_unix_ns=0, torn=True)
    announced = one_read({0: ledger((1, 0, 0)), 1: ledger()}, [said])
    HistoryChecker(announced, Consistency.parse("eventual")).check()


def test_the_checker_sees_a_loss_that_was_announced_but_did_not_happen() -> None:
    lost = ShardRestored(
        shard=0,
        epoch=2,
        source="start",
        lost=(LostUpdates(member="1.0", first=0, last=0),),
        at_unix_ns=0,
        took_ns=0,
    )
    history = one_read({0: ledger((1, 0, 0))}, [lost, (1, 0, 0)])
    with pytest.raises(AssertionError, match="which it said it lost"):
        HistoryChecker(history, Consistency.parse("eventual")).check()


# Single promises


def events(server: SimulatedServer, kind: type) -> list:
    return [what for name, what in server.history.entries if type(what) is kind]


QUIET = Faults(lost=0.0, repeated=0.0, delay_s=0.01, worker_kills=0, shard_kills=0)


def test_a_dead_worker_is_evicted_after_the_deadline_and_may_come_back() -> None:
    server = SimulatedServer("bounded:1", faults=QUIET, workers=2)

    async def story() -> None:
        await server.start()
        dies = asyncio.ensure_future(server.train(0, 50, 1.0))
        lives = asyncio.ensure_future(server.train(1, 20, 1.0))
        await asyncio.sleep(6.0)
        dies.cancel()
        await asyncio.sleep(60.0)
        await server.train(0, 3, 1.0)
        await lives

    run_in_virtual_time(story())
    HistoryChecker(server.history, server.consistency).check()
    changes = [(one.change, one.worker, one.life) for one in events(server, MemberChange)]
    assert changes.index(("evicted", 0, 0)) < changes.index(("joined", 0, 1))
    assert ("left", 1, 0) in changes
    rejoined = next(one for one in events(server, MemberChange) if one.life == 1)
    assert rejoined.clock > 3  # it starts where the others are


def restored_after_kill(consistency: str, replicas: int, checkpoint: bool) -> SimulatedServer:
    server = SimulatedServer(consistency, faults=QUIET, workers=2, replicas=replicas)

    async def story() -> None:
        await server.start()
        workers = [asyncio.ensure_future(server.train(rank, 12, 1.0)) for rank in range(2)]
        await asyncio.sleep(5.0)
        if checkpoint:
            await server.checkpoint()
        await asyncio.sleep(4.0)
        server.network.kill(server.coordinator._shards.routes()[0].address)
        await asyncio.gather(*workers)
        await server.read_final()

    run_in_virtual_time(story())
    HistoryChecker(server.history, server.consistency).check()
    return server


@pytest.mark.parametrize("consistency", ["strong", "bounded:2", "eventual"])
def test_a_replica_takes_over_without_loss(consistency: str) -> None:
    (restored,) = events(restored_after_kill(consistency, 1, checkpoint=False), ShardRestored)
    assert (restored.source, restored.lost, restored.epoch) == ("replica", (), 2)
    assert restored.detail == "shard 0 was restored from its replica: no update was lost"


@pytest.mark.parametrize("consistency", ["strong", "bounded:2", "eventual"])
def test_without_a_replica_the_last_checkpoint_is_used_and_the_loss_is_said(
    consistency: str,
) -> None:
    server = restored_after_kill(consistency, 0, checkpoint=True)
    (restored,) = events(server, ShardRestored)
    assert restored.source == "checkpoint"
    assert {one.member for one in restored.lost} == {"0.0", "1.0"}
    ((_, counts, _),) = [what for name, what in server.history.entries if name == "cut"]
    assert {one.member: one.first for one in restored.lost} == counts
    (final,) = [what for name, what in server.history.entries if name == "final"]
    missing = {one: (one.first, one.last) for one in restored.lost}
    for one, (first, last) in missing.items():
        rank, life = map(int, one.member.split("."))
        assert not final[0][rank, life, first : last + 1].any()
        assert final[1][rank, life, first : last + 1].all()


def test_a_full_queue_sends_workers_away_and_never_grows() -> None:
    faults = Faults(
        lost=0.0, repeated=0.5, delay_s=0.01, worker_kills=0, shard_kills=0, slow_shard=0, slow_s=1
    )
    server = SimulatedServer("eventual", faults=faults, replicas=0, queue_limit=1)

    async def story() -> None:
        await server.start()
        await asyncio.gather(*(server.train(rank, 5, 0.01) for rank in range(RANKS)))
        await server.read_final()

    run_in_virtual_time(story())
    HistoryChecker(server.history, server.consistency).check()
    assert server.network.answers["Busy"] > 0
    queues = [one.queue for one in (*events(server, PullServed), *events(server, UpdateApplied))]
    assert max(queues) == 0  # one at work, one that waits, and nobody before that one


def test_weak_reads_are_young_and_see_everything_after_a_sync_point() -> None:
    server = SimulatedServer("weak:3", faults=QUIET, workers=2)
    fetched: dict[int, list[int]] = {0: [], 1: []}

    async def worker(rank: int) -> None:
        client = server.client(rank)
        await client.join()
        packers: list[GradientPacker] = server.packers()
        for step in range(8):
            before = len(server.history.entries)
            await server.one_step(client, packers, 0.1 + rank)
            reads = [what for name, what in server.history.entries[before:] if name == "pull"]
            if any(me[0] == rank for _, me, _ in reads):
                fetched[rank].append(step)
            if step == 3:
                await client.reach_sync_point()
                flats = await client.pull(server.consistency)
                server.history.add("synced", {s: flat.copy() for s, flat in flats.items()})
        await client.leave()

    async def story() -> None:
        await server.start()
        await asyncio.gather(worker(0), worker(1))

    run_in_virtual_time(story())
    assert fetched == {0: [0, 3, 7], 1: [0, 3, 7]}
    for name, flats in server.history.entries:
        if name == "synced":
            seen = flats[0][: RANKS * LIVES * CLOCKS * 8].view(np.float64)
            seen = seen.reshape(RANKS, LIVES, CLOCKS)
            assert seen[0, 0, :4].all()
            assert seen[1, 0, :4].all()
