"""The suite's models of words, speech and streams: published sizes, steps, targets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from stepscope.bench.catalogue import load
from stepscope.bench.workload import TrainingPlace
from stepscope.bench.workloads.audio import DeepSpeech2
from stepscope.bench.workloads.language_models import GPT2, Experts, MixtureOfExperts
from stepscope.bench.workloads.sequence_models import (
    Bert,
    BitStreamRNN,
    TranslationLSTM,
    TranslationTransformer,
)

NAMES = (
    "bert-large", "bert-medium", "deep-speech-2", "gpt2", "long-rnn", "moe", "nmt-lstm",
    "transformer",
)  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def losses(name: str, place: TrainingPlace, steps: int = 2, **changes: Any) -> torch.Tensor:
    """A workload's first losses in tiny."""
    workload = load(name)
    torch.manual_seed(place.seed)
    step = workload.build(workload.config("tiny", changes), place)
    return torch.stack([step(number).detach() for number in range(steps)])


def parameters(model: type[nn.Module], name: str, size: Any = "paper") -> int:
    config = load(name).config(size)
    with torch.device("meta"):
        made = model(config)
    return sum(weight.numel() for weight in made.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_two_builds_with_one_seed_train_alike(name: str) -> None:
    first, second = (losses(name, TrainingPlace(CPU, seed=3)) for _ in range(2))
    assert first.isfinite().all()
    assert first.dtype == torch.float32
    assert torch.equal(first, second)
    assert not torch.equal(first, losses(name, TrainingPlace(CPU, seed=4)))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_trains_on_as_many_samples_as_its_batch(name: str) -> None:
    samples = []
    seen = register_module_forward_pre_hook(lambda _, args: samples.append(len(args[0])))
    try:
        losses(name, TrainingPlace(CPU), steps=1, batch="3")
    finally:
        seen.remove()
    assert samples[0] == 3  # the first to be called is the whole model


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # of the flags below
@pytest.mark.parametrize("name", NAMES)
def test_losses_are_of_full_precision_under_autocast(name: str) -> None:
    # Without oneDNN, whose LSTM refuses bf16 on processors that lack it.
    with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", torch.bfloat16):
        trained = losses(name, TrainingPlace(CPU), steps=1, batch="2")
    assert trained.dtype == torch.float32
    assert trained.isfinite().all()


def test_models_train_in_distributed_data_parallel(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        for name in NAMES:
            wrapped = losses(name, TrainingPlace(CPU, ranks=2), batch="2")
            assert torch.equal(wrapped, losses(name, TrainingPlace(CPU), batch="2")), name
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tiny_reaches_its_target(name: str, seed: int) -> None:
    target = load(name).targets["tiny"]
    trained = losses(name, TrainingPlace(CPU, seed=seed), target.steps)
    assert trained[-target.over :].mean() < target.loss < trained[0]


class CompiledPlace(TrainingPlace):
    def put(self, model: nn.Module) -> nn.Module:
        model.compile(backend="aot_eager")
        return model


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch warns about its own recurrent layers
@pytest.mark.parametrize("name", NAMES)
def test_compiled_models_train_alike(name: str) -> None:
    torch.compiler.reset()
    compiled = losses(name, CompiledPlace(CPU), batch="2", **no_dropout(name))
    eager = losses(name, TrainingPlace(CPU), batch="2", **no_dropout(name))
    torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-3)


def no_dropout(name: str) -> dict[str, str]:
    """Compiled dropout draws other numbers."""
    return {setting: "0" for setting in load(name).sizes["tiny"] if "dropout" in setting}


def test_gpt2_small_has_124_million_parameters() -> None:
    """As in the weights that OpenAI released: 124 439 808; the paper's 117 M was a mistake."""
    assert parameters(GPT2, "gpt2") == 124_439_808


def test_bert_has_the_published_parameters() -> None:
    """41.7 M in the table of Google's smaller BERTs, 340 M in the paper (336.2 M released)."""
    assert parameters(Bert, "bert-medium") == pytest.approx(41.7e6, rel=0.01)
    assert parameters(Bert, "bert-large") == pytest.approx(340e6, rel=0.015)
    assert parameters(Bert, "bert-large") == 336_226_108


def test_transformer_base_has_the_published_parameters() -> None:
    """65 M in table 3 of the paper, which says 37 000 words "about": they make 63.1 M."""
    attention, feed, norm = 4 * (512 * 512 + 512), 2 * 512 * 2048 + 2048 + 512, 2 * 512
    encoder, decoder = attention + feed + 2 * norm, 2 * attention + feed + 3 * norm
    by_hand = 37_000 * 512 + 6 * (encoder + decoder)
    assert parameters(TranslationTransformer, "transformer") == by_hand
    assert by_hand == pytest.approx(65e6, rel=0.035)


def test_lstm_translation_has_the_parameters_of_its_layers() -> None:
    """Luong's four layers of 1000 with input feeding: "over 200 million" (See et al., 2016)."""
    words, layer, first = 50_000 * 1_000, 4 * 1_000 * 2_000 + 8_000, 4 * 1_000 * 3_000 + 8_000
    by_hand = 3 * words + 4 * layer + first + 3 * layer + 2_000 * 1_000
    assert parameters(TranslationLSTM, "nmt-lstm") == by_hand
    assert 200e6 < by_hand < 225e6


def test_deep_speech_2_has_38_million_parameters() -> None:
    """As all networks of the paper's table of depths; MLPerf 0.5 trained this one."""
    convolutions = 32 * (41 * 11 + 1) + 32 * (32 * 21 * 11 + 1) + 2 * 64
    layers = 2 * 3 * 800 * (672 + 800) + 4 * (2 * 3 * 800 * 1_600 + 1_600)
    by_hand = convolutions + layers + 1_600 + 800 * 29
    assert parameters(DeepSpeech2, "deep-speech-2") == by_hand
    assert by_hand == pytest.approx(38e6, rel=0.01)


def test_mixture_of_experts_has_1_9_billion_parameters() -> None:
    """GLaM's 0.1B/64E: 12 layers of 768, 64 experts in every second one."""
    assert parameters(MixtureOfExperts, "moe") == pytest.approx(1.9e9, rel=0.01)


def test_long_rnn_is_that_of_bppsa() -> None:
    """20 states: input, recurrence and two biases; ten classes."""
    assert parameters(BitStreamRNN, "long-rnn") == 20 + 400 + 40 + 210


def test_an_expert_takes_no_more_than_its_capacity() -> None:
    experts = Experts(load("moe").config("tiny"))
    chosen = torch.tensor([[0, 1], [0, 2], [0, 1], [3, 0]])
    slots, first = experts.slots(chosen, capacity=2)
    full = 4 * 2
    # First choices before second ones: expert 0 is full after two words.
    assert slots.tolist() == [0, 1, full, 6, 2, 4, 3, full]
    assert first.tolist() == [0.75, 0.0, 0.0, 0.25]


def test_experts_add_what_the_chosen_ones_make() -> None:
    torch.manual_seed(0)
    experts = Experts(load("moe").config("tiny", {"capacity_factor": 4}))
    x = torch.randn(2, 5, experts.gate.in_features)
    out, balance = experts(x)
    weights, chosen = experts.gate(x).softmax(2).topk(2, 2)
    weights = weights / weights.sum(2, keepdim=True)
    made = nn.functional.gelu(torch.einsum("btw,ewf->btef", x, experts.up))
    made = torch.einsum("btef,efw->btew", made, experts.down)
    wanted = (made.gather(2, chosen[..., None].expand(-1, -1, -1, 64)) * weights[..., None]).sum(2)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    assert balance.item() >= 0.5
