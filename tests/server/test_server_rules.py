"""The parameter server's parts, one by one, and strong consistency against plain training."""

from __future__ import annotations

import asyncio
import copy
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from simulated_server import Faults, SimulatedServer, run_in_virtual_time

from server_event_lines import EVENT_TYPES, event_from
from stepscope.errors import UnreadableInputError, UsageError
from stepscope.fix.server.membership import (
    CheckpointCut,
    ClockTable,
    LostUpdates,
    ShardRestored,
    event_line,
)
from stepscope.fix.server.messages import (
    Compression,
    GradientPacker,
    assign,
    flatten,
    lay_out,
    shard_layouts,
    unflatten,
    unpack,
)
from stepscope.fix.server.ray_actors import EventLog, run_folder
from stepscope.fix.server.shard_state import (
    ShardSnapshot,
    group_settings,
    load_cut,
    make_recipe,
    save_cut,
    saved_cuts,
)
from stepscope.records.change_values import Consistency

# Consistency


@pytest.mark.parametrize(
    ("text", "mode", "bound"),
    [
        ("strong", "strong", 0),
        ("bounded:3", "bounded", 3),
        ("bounded(0)", "bounded", 0),
        ("eventual", "eventual", None),
        ("weak", "weak", 8),
        ("weak:2", "weak", 2),
    ],
)
def test_consistency_is_spelled_like_this(text: str, mode: str, bound: int | None) -> None:
    assert Consistency.parse(text) == Consistency(mode, bound)


@pytest.mark.parametrize("text", ["", "bounded", "strong:1", "eventual:2", "bounded:-1", "fast"])
def test_other_spellings_are_an_error_that_says_what_to_use(text: str) -> None:
    with pytest.raises(UsageError, match='use "strong", "bounded:3"'):
        Consistency.parse(text)


def test_bounded_by_zero_is_strong() -> None:
    assert Consistency.parse("bounded:0").synchronous
    assert not Consistency.parse("bounded:1").synchronous
    assert not Consistency.parse("weak:0").synchronous


def table(consistency: str, counts: list[int]) -> ClockTable:
    made = ClockTable(consistency=Consistency.parse(consistency))
    for rank, count in enumerate(counts):
        member = made.plan_member(rank, now=0.0)
        made.add(member)
        member.count = count
    return made


def test_a_reader_waits_for_those_too_far_behind_and_knows_whom() -> None:
    three = table("bounded:2", [5, 3, 2])
    assert three.blockers("0.0", 5) == [2]
    assert not three.may_read("0.0", 5)
    assert three.may_read("1.0", 3)
    assert table("eventual", [50, 0]).may_read("0.0", 50)


def test_a_newcomer_starts_with_the_slowest() -> None:
    assert table("bounded:2", [5, 3]).plan_member(7, now=0.0).count == 3


def test_silence_is_measured_from_the_last_message() -> None:
    two = table("bounded:2", [0, 0])
    two.members["1.0"].heard_at = 50.0
    assert two.overdue(now=60.0, deadline_s=30.0) == ["0.0"]


def test_importing_the_package_imports_neither_torch_nor_ray() -> None:
    script = "import sys, stepscope.fix.server; assert not {'torch', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


# Layout


def test_tensors_are_shared_out_by_size() -> None:
    sizes = {"a": 10, "b": 90, "c": 50, "d": 45}
    assert assign(sizes, 2) == [["a", "b"], ["c", "d"]]


def test_mixed_types_travel_in_one_flat_message() -> None:
    tensors = {
        "half": torch.randn(3, 5).bfloat16(),
        "byte": torch.arange(7, dtype=torch.uint8),
        "double": torch.randn(2, 2, dtype=torch.float64),
        "strided": torch.randn(4, 6).t(),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
    }
    layout = lay_out([(name, tuple(t.shape), t.dtype, True) for name, t in tensors.items()])
    back = {name: torch.zeros_like(one) for name, one in tensors.items()}
    unflatten(layout, flatten(layout, tensors), back)
    assert all(torch.equal(back[name], one) for name, one in tensors.items())


def test_more_shards_than_tensors_is_an_error() -> None:
    with pytest.raises(UsageError, match="shards=3, but the model has 2 parameter tensors"):
        shard_layouts(dict(torch.nn.Linear(2, 2).named_parameters()), 3)


# Compression


def weights(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def pack_and_unpack(text: str | None, gradients: dict[str, torch.Tensor | None]) -> dict:
    shapes = {name: one for name, one in gradients.items() if one is not None}
    layout = lay_out([(name, tuple(t.shape), t.dtype, True) for name, t in shapes.items()])
    compression = Compression.parse(text)
    return unpack(compression, layout, GradientPacker(compression, layout).pack(gradients))


def test_plain_gradients_arrive_as_they_are() -> None:
    gradients = weights(a=(3, 4), b=(5,))
    arrived = pack_and_unpack(None, gradients)
    assert all(torch.equal(arrived[name], one) for name, one in gradients.items())


def test_bf16_halves_the_message_and_rounds_once() -> None:
    layout = lay_out([("a", (64, 64), torch.float32, True)])
    gradient = {"a": torch.randn(64, 64)}
    sizes = [
        GradientPacker(Compression.parse(text), layout).pack(gradient).size_bytes
        for text in (None, "bf16")
    ]
    assert sizes == [64 * 64 * 4, 64 * 64 * 2]
    arrived = pack_and_unpack("bf16", gradient)["a"]
    assert torch.equal(arrived, gradient["a"].bfloat16().float())


def test_top_k_sends_the_largest_and_forgets_nothing() -> None:
    compression = Compression.parse("top-k:0.1")
    layout = lay_out([("a", (10, 10), torch.float64, True), ("b", (3,), torch.float64, True)])
    packer = GradientPacker(compression, layout)
    given, arrived = torch.zeros(10, 10).double(), torch.zeros(10, 10).double()
    for _ in range(50):
        gradient = torch.randint(-8, 9, (10, 10)).double()  # whole numbers add up exactly
        given += gradient
        packed = packer.pack({"a": gradient, "b": torch.zeros(3).double()})
        assert [len(one) for one in packed.chosen] == [10, 1]
        arrived += unpack(compression, layout, packed)["a"]
    for _ in range(200):  # what was kept back comes too
        packed = packer.pack({"a": torch.zeros(10, 10).double(), "b": torch.zeros(3).double()})
        arrived += unpack(compression, layout, packed)["a"]
    assert torch.equal(given, arrived)


def test_a_parameter_without_gradient_is_not_sent() -> None:
    layout = lay_out([(name, (2,), torch.float32, True) for name in "ab"])
    for text in (None, "bf16", "top-k:0.5"):
        compression = Compression.parse(text)
        packed = GradientPacker(compression, layout).pack({"a": None, "b": torch.ones(2)})
        assert set(unpack(compression, layout, packed)) == {"b"}


@pytest.mark.parametrize("text", ["fp8", "top-k", "top-k:0", "top-k:2", ""])
def test_unknown_compression_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="Use None"):
        Compression.parse(text)


# Optimizers


def test_a_recipe_keeps_groups_and_their_settings() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    groups = [
        {"params": list(model[0].parameters()), "lr": 0.1},
        {"params": list(model[1].parameters()), "lr": 0.2, "weight_decay": 0.5},
    ]
    recipe = make_recipe(torch.optim.AdamW(groups, lr=1.0), dict(model.named_parameters()))
    built, places = recipe.build({"1.bias": torch.nn.Parameter(torch.zeros(1))})
    assert places == {1: 0}
    assert (built.param_groups[0]["lr"], built.param_groups[0]["weight_decay"]) == (0.2, 0.5)


def test_an_optimizer_of_another_model_is_an_error() -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match="2 tensors that are not parameters of the model"):
        make_recipe(torch.optim.SGD(other.parameters(), lr=1), dict(model.named_parameters()))


# Strong consistency against plain training

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, amsgrad=True),
}


def small_model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.LayerNorm(33), torch.nn.Linear(33, 5)
    )


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(11, 7, generator=generator)
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


def plain_training(make_optimizer, workers: int, steps: int) -> dict[str, torch.Tensor]:
    """Synchronous SGD in one process: gradients of all ranks, added in order, their mean."""
    model = small_model()
    optimizer = make_optimizer(list(model.parameters()))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    for step in range(steps):
        totals = None
        for rank in range(workers):
            gradients = torch.autograd.grad(loss_of(model, rank, step), list(model.parameters()))
            if totals is None:
                totals = [one.clone() for one in gradients]
            else:
                for total, one in zip(totals, gradients, strict=True):
                    total += one
        for parameter, total in zip(model.parameters(), totals, strict=True):
            parameter.grad = total / workers
        optimizer.step()
        schedule.step()
    return model.state_dict()


def served_training(make_optimizer, workers: int, steps: int, seed: int) -> dict:
    model = small_model()
    server = SimulatedServer(
        "bounded:0",
        seed=seed,
        faults=Faults(lost=0.05, repeated=0.2, delay_s=0.3, worker_kills=0),
        tensors=dict(model.named_parameters()),
        optimizer=make_optimizer,
        workers=workers,
    )

    async def work(rank: int) -> None:
        mine = copy.deepcopy(model)
        client = server.client(rank)
        await client.join()
        stay = asyncio.ensure_future(client.stay(5.0))
        packers = server.packers()
        named = dict(mine.named_parameters())
        optimizer = make_optimizer(list(named.values()))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        for step in range(steps):
            await read(client, named)
            mine.zero_grad()
            loss_of(mine, rank, step).backward()
            await asyncio.sleep(server.network.random.random() * 3)
            gradients = {name: one.grad for name, one in named.items()}
            packed = {shard: one.pack(gradients) for shard, one in enumerate(packers)}
            assert await client.push(packed, settings=group_settings(optimizer))
            optimizer.zero_grad()
            schedule.step()
            if rank == 0 and step == steps // 2:
                server.network.kill(server.coordinator._shards.routes()[1].address)
        await read(client, dict(model.named_parameters()))
        stay.cancel()

    async def read(client, parameters) -> None:
        flats = await client.pull(server.consistency)
        with torch.no_grad():
            for shard, flat in flats.items():
                unflatten(server.layouts[shard], torch.tensor(flat), parameters)

    async def story() -> None:
        await server.start()
        await asyncio.gather(*(work(rank) for rank in range(workers)))

    run_in_virtual_time(story())
    return model.state_dict()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_bound_of_zero_is_synchronous_training_bit_for_bit(optimizer: str) -> None:
    """Whatever the network does, and although a shard's actor dies half way."""
    make = OPTIMIZERS[optimizer]
    expected = plain_training(make, workers=3, steps=8)
    served = served_training(make, workers=3, steps=8, seed=len(optimizer))
    assert all(torch.equal(served[name], one) for name, one in expected.items())
    assert not torch.equal(expected["0.weight"], small_model().state_dict()["0.weight"])


# Files


def snapshots(layouts) -> list[ShardSnapshot]:
    return [
        ShardSnapshot(
            flat=np.random.default_rng(shard).integers(0, 255, one.size_bytes, dtype=np.uint8),
            optimizer={"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": []},
            counts={"0.0": 4},
            updates=9,
        )
        for shard, one in enumerate(layouts)
    ]


def test_checkpoints_are_read_back_and_old_ones_go(tmp_path: Path) -> None:
    layouts = shard_layouts(dict(small_model().named_parameters()), 2)
    made = snapshots(layouts)
    for cut in (1, 2, 3):
        save_cut(tmp_path, cut, layouts, made)
    assert [one.name for one in saved_cuts(tmp_path)] == ["cut-000002", "cut-000003"]
    back = load_cut(saved_cuts(tmp_path)[-1], layouts)
    assert all(np.array_equal(one.flat, two.flat) for one, two in zip(made, back, strict=True))
    assert back[0].optimizer["state"][0]["step"] == 3
    assert back[0].updates == 9


def test_a_checkpoint_of_another_model_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    layouts = shard_layouts(dict(small_model().named_parameters()), 2)
    cut = save_cut(tmp_path, 1, layouts, snapshots(layouts))
    others = shard_layouts(dict(torch.nn.Linear(3, 3).named_parameters()), 2)
    with pytest.raises(UnreadableInputError, match="saved for another model"):
        load_cut(cut, others)
    (cut / "shard-0000.pt").write_bytes(b"nothing")
    with pytest.raises(UnreadableInputError, match="is not a checkpoint of a shard"):
        load_cut(cut, layouts)


def test_events_are_written_and_read_back(tmp_path: Path) -> None:
    events = [
        ShardRestored(
            shard=1,
            epoch=2,
            source="checkpoint",
            lost=(LostUpdates(member="0.0", first=2, last=4),),
            at_unix_ns=5,
            took_ns=6,
        ),
        CheckpointCut(cut=1, counts={"0.0": 3}, at_unix_ns=1, took_ns=2, size_bytes=3),
    ]
    log = EventLog(str(tmp_path), "coordinator.jsonl")
    for event in events:
        log.write(event)
    log.close()
    lines = (tmp_path / "together/coordinator.jsonl").read_text().splitlines()
    assert [event_from(json.loads(line)) for line in lines] == events
    assert event_from({"event": "of a later version"}) is None
    assert len(EVENT_TYPES) == 8
    assert event_line(events[1]).endswith("}\n")


def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path: Path, capsys) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    log = EventLog(str(blocked), "coordinator.jsonl")
    log.write(CheckpointCut(cut=1, counts={}, at_unix_ns=1, took_ns=2, size_bytes=3))
    assert "events of the parameter server cannot be written" in capsys.readouterr().err


def test_under_stepscope_run_its_folder_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_CAPTURE", '{"folder": "/runs/7"}')
    assert run_folder() == "/runs/7"
    monkeypatch.delenv("STEPSCOPE_CAPTURE")
    assert run_folder() is None
