"""loader-workers, persistent-workers, prefetch-factor: DataLoaders that feed a training."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from injected import assert_patch_trains_the_same, patch_of, run_injected

from stepscope.changes.change import Effect
from stepscope.errors import UsageError
from stepscope.fix.named_changes import choose, load_change
from stepscope.fix.proposal import Script, edited
from stepscope.records.script_facts import Built, Frame, ScriptFacts

if TYPE_CHECKING:
    from pathlib import Path

LOADED = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((4,), float(index)) / 24, torch.tensor(float(index % 3))


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Rows(), batch_size=8, shuffle=True)
for epoch in range(3):
    for x, y in loader:
        loss = (model(x).squeeze(1) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
RANDOM = LOADED.replace("float(index)) / 24", "float(index)) / 24 + torch.rand(4)")


def loader(**fields: Any) -> Built:
    options = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
    given = {"options": options | fields.pop("options", {})}
    return replace(
        Built(kind="loader", type="DataLoader", options={}, given=(), frames=()), **given, **fields
    )


def why(remedy: str, value: str, *built: Built, **facts: Any) -> str | None:
    known = {"cores": 8, "machine_cores": 8} | facts
    return load_change(remedy).fix.fits(ScriptFacts(built=built, **known), value)


def test_workers_are_at_most_twice_as_many_as_a_rank_has_cores() -> None:
    assert why("loader-workers", "16", loader()) is None
    assert why("loader-workers", "16", loader(), local_ranks=2) == "a rank has 4 cores here"
    assert why("loader-workers", "16", loader(), local_ranks=2, machine_cores=16) is None
    assert why("loader-workers", "5", loader(), cores=2) == "a rank has 2 cores here"
    assert "feeds" in str(why("loader-workers", "2"))
    assert "feeds" in str(why("loader-workers", "2", loader(trains=False)))
    assert "already" in str(why("loader-workers", "2", loader(options={"num_workers": 2})))
    assert "all of it" in str(why("loader-workers", "2", loader(iterable=True)))
    assert why("loader-workers", "1", loader(iterable=True)) is None


def test_a_loader_with_workers_may_be_tried_without() -> None:
    busy = loader(options={"num_workers": 2})
    assert why("loader-workers", "0", busy) is None
    assert why("loader-workers", "0", loader()) == "the DataLoader has no workers already"
    call = "DataLoader(rows, num_workers={}, persistent_workers={}, prefetch_factor={})"
    given = ("dataset", "num_workers", "persistent_workers", "prefetch_factor")
    file, text = "/home/u/train.py", f"loader = {call.format(2, True, 4)}\n".encode()
    built = replace(busy, frames=(Frame(file=file, line=1, function="<module>"),), given=given)
    read = {file: text}.get
    proposal = load_change("loader-workers").fix.patch(
        Script(ScriptFacts(built=(built,)), read), "0"
    )
    source = edited(proposal.edits, read)[file].decode().strip()
    assert source == f"loader = {call.format(0, False, None)}"


@pytest.mark.slow
def test_without_workers_their_other_arguments_go_too(tmp_path: Path) -> None:
    with_workers = LOADED.replace(
        "shuffle=True)", "shuffle=True, num_workers=1, prefetch_factor=4, timeout=60)"
    )
    plain = run_injected(tmp_path, with_workers, steps=8)
    run = run_injected(tmp_path, with_workers, "loader-workers=0", steps=8)
    assert run.did["loader-workers=0"] == ["DataLoader: num_workers=0"]
    assert run.losses == plain.losses


def test_workers_may_turn_out_to_change_nothing() -> None:
    fix = load_change("loader-workers").application
    assert (fix.effect, fix.may_be) == (Effect.RANDOM, Effect.BIT_IDENTICAL)
    assert choose("loader-workers=3").value == "3"
    with pytest.raises(UsageError, match="does not take the value 'many'"):
        choose("loader-workers=many")


def test_workers_need_to_be_there_for_the_rest() -> None:
    busy = loader(options={"num_workers": 2, "prefetch_factor": 2}, begun=3)
    assert why("prefetch-factor", "4", busy) is None
    assert why("persistent-workers", "", busy) is None
    assert "no workers" in str(why("prefetch-factor", "4", loader()))
    assert "no workers" in str(why("persistent-workers", "", loader(begun=3)))
    assert "second epoch" in str(why("persistent-workers", "", replace(busy, begun=1)))
    ahead = loader(options={"num_workers": 2, "prefetch_factor": 4})
    assert "already" in str(why("prefetch-factor", "4", ahead))
    lasting = loader(options={"num_workers": 2, "persistent_workers": True}, begun=3)
    assert "already" in str(why("persistent-workers", "", lasting))
    for name in ("prefetch-factor", "persistent-workers"):
        assert load_change(name).application.after == {"loader-workers"}


@pytest.mark.slow
def test_workers_give_the_same_batches_if_nothing_is_random(tmp_path: Path) -> None:
    plain = run_injected(tmp_path, LOADED, steps=8)
    (built,) = plain.facts.of_kind("loader")
    assert (built.trains, built.begun, built.iterable) == (True, 3, False)
    run = run_injected(tmp_path, LOADED, "loader-workers=2", steps=8)
    assert run.did["loader-workers=2"] == ["DataLoader: num_workers=2"]
    assert run.losses == plain.losses


@pytest.mark.slow
def test_workers_trains_as_its_patch_does_even_with_random_data(tmp_path: Path) -> None:
    plain = run_injected(tmp_path, RANDOM)
    source = assert_patch_trains_the_same(tmp_path, RANDOM, "loader-workers=2")
    assert "DataLoader(Rows(), batch_size=8, shuffle=True, num_workers=2)" in source
    assert run_injected(tmp_path, RANDOM, "loader-workers=2").losses != plain.losses


@pytest.mark.slow
def test_all_of_a_loaders_remedies_together_in_any_order(tmp_path: Path) -> None:
    together = ("prefetch-factor=4", "persistent-workers", "loader-workers=1")
    source = assert_patch_trains_the_same(tmp_path, LOADED, *together, steps=8)
    for argument in ("num_workers=1", "persistent_workers=True", "prefetch_factor=4"):
        assert argument in source


def patched(call: str, *more: Built) -> tuple[str, tuple[str, ...]]:
    file, text = "/home/u/train.py", f"loader = {call}\n".encode()
    built = loader(frames=(Frame(file=file, line=1, function="<module>"),))
    read = {file: text}.get
    proposal = load_change("loader-workers").fix.patch(
        Script(ScriptFacts(built=(built, *more)), read), "1"
    )
    return edited(proposal.edits, read)[file].decode().strip(), proposal.by_hand


def test_a_given_number_of_workers_is_replaced() -> None:
    positional = "DataLoader(rows, 8, True, None, None, {}, fold)"
    assert patched(positional.format(2))[0] == "loader = " + positional.format(1)
    named = "DataLoader(rows, num_workers={}, batch_size=8)"
    assert patched(named.format("args.workers"))[0] == "loader = " + named.format(1)


def test_a_loader_that_a_library_makes_of_the_users_is_not_named() -> None:
    again = loader(type="DataLoaderShard", direct=False, library="accelerate")
    text, by_hand = patched("DataLoader(rows, 8)", again)
    assert text == "loader = DataLoader(rows, 8, num_workers=1)"
    assert by_hand == ()


ACCELERATED = LOADED.replace(
    "for epoch in",
    "from accelerate import Accelerator\n"
    "accelerator = Accelerator(cpu=True)\n"
    "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
    "for epoch in",
).replace("loss.backward()", "accelerator.backward(loss)")


@pytest.mark.slow
def test_the_users_own_loader_is_found_behind_accelerates(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    run = run_injected(tmp_path, ACCELERATED, "loader-workers=1")
    own, made_of_it = run.facts.of_kind("loader")
    assert (own.direct, made_of_it.library) == (True, "accelerate")
    assert own.trains
    _, text = patch_of(run, "loader-workers=2")
    assert b"shuffle=True, num_workers=2)" in text


ITERABLE = LOADED.replace("DataLoader, Dataset", "DataLoader, IterableDataset").replace(
    "class Rows(Dataset):",
    "class Rows(IterableDataset):\n"
    "    def __iter__(self):\n"
    "        return (self[i] for i in range(24))\n",
)


@pytest.mark.slow
def test_a_dataset_that_only_yields_would_be_read_several_times(tmp_path: Path) -> None:
    script = ITERABLE.replace(", shuffle=True", "")
    plain = run_injected(tmp_path, script)
    assert "all of it" in str(load_change("loader-workers").fix.fits(plain.facts, "1"))
    run = run_injected(tmp_path, script, "loader-workers=1", "persistent-workers")
    assert "all of it" in run.refused["loader-workers=1"]
    assert "no workers" in run.refused["persistent-workers"]
    assert run.losses == plain.losses


def test_a_loader_of_the_trainer_is_its_option() -> None:
    built = loader(direct=False, library="transformers")
    script = Script(ScriptFacts(built=(built,)), lambda _file: None)
    (words,) = load_change("loader-workers").fix.patch(script, "4").by_hand
    assert "dataloader_num_workers=4" in words
