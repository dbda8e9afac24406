"""Ask many models for their batch: is it right, or refused with a reason, and never silently wrong?

    python benchmarks/batch_questions.py [--json FILE] [NAMES]

Tiny configurations of library models (transformers, torchvision, torch_geometric, where they are
installed) and of plain torch are captured for some steps on the CPU. Each is asked twice: with all
that the run folder says, and from its bare trace.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stepscope
from stepscope.explain.batch import find_batch, read_batch
from stepscope.explain.rank_analysis import RankAnalysis
from stepscope.records.explanation import BatchReading

Step = Callable[[], torch.Tensor]  # returns the loss
F = nn.functional
CASES: dict[str, tuple[int, Callable[[int], tuple[nn.Module, Step]]]] = {}


def case(batch: int) -> Callable[[Any], Any]:
    def declare(make: Any) -> Any:
        CASES[make.__name__] = (batch, make)
        return make

    return declare


# Plain torch.


@case(24)
def mlp(batch: int) -> tuple[nn.Module, Step]:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
    x, y = torch.randn(batch, 16), torch.randint(10, (batch,))
    return model, lambda: F.cross_entropy(model(x), y)


class Joined(nn.Module):
    """Reads two pictures at once, as optical flow does."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.encode = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2))
        self.head = nn.Linear(8 * parts, 2)

    def forward(self, *pictures: torch.Tensor) -> torch.Tensor:
        read = self.encode(torch.cat(pictures)).mean((2, 3))
        return self.head(torch.cat(read.chunk(self.parts), 1))


@case(8)
def two_pictures(batch: int) -> tuple[nn.Module, Step]:
    model = Joined(2)
    first, second = torch.randn(batch, 3, 32, 32), torch.randn(batch, 3, 32, 32)
    return model, lambda: F.mse_loss(model(first, second), torch.zeros(batch, 2))


@case(6)
def triplets(batch: int) -> tuple[nn.Module, Step]:
    model = Joined(3)
    given = [torch.randn(batch, 3, 32, 32) for _ in range(3)]
    return model, lambda: model(*given).square().mean()


class Frames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Conv2d(3, 8, 3, 2)
        self.head = nn.Linear(8, 5)

    def forward(self, video: torch.Tensor) -> torch.Tensor:
        features = self.encode(video.flatten(0, 1)).mean((2, 3))
        return self.head(features.unflatten(0, video.shape[:2]).mean(1))


@case(4)
def frames_as_samples(batch: int) -> tuple[nn.Module, Step]:
    model = Frames()
    video, y = torch.randn(batch, 6, 3, 24, 24), torch.randint(5, (batch,))
    return model, lambda: F.cross_entropy(model(video), y)


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.Module], *, batch_first: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.layer = kind(16, 16, batch_first=batch_first)
        self.head = nn.Linear(16, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.words(tokens))[0])


def _tagger(kind: type[nn.Module], shape: tuple[int, int], first: bool) -> tuple[nn.Module, Step]:
    model, tokens = Tagger(kind, batch_first=first), torch.randint(50, shape)
    return model, lambda: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


@case(20)
def lstm_time_first(batch: int) -> tuple[nn.Module, Step]:
    return _tagger(nn.LSTM, (35, batch), False)


@case(20)
def gru_batch_first(batch: int) -> tuple[nn.Module, Step]:
    return _tagger(nn.GRU, (batch, 35), True)


class Translator(nn.Module):
    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=batch_first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(tokens)))


@case(10)
def transformer_time_first(batch: int) -> tuple[nn.Module, Step]:
    model, tokens = Translator(batch_first=False), torch.randint(50, (32, batch))
    return model, lambda: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


@case(10)
def transformer_batch_first(batch: int) -> tuple[nn.Module, Step]:
    model, tokens = Translator(batch_first=True), torch.randint(50, (batch, 32))
    return model, lambda: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


@case(64)
def rays(batch: int) -> tuple[nn.Module, Step]:
    """As radiance fields read the points along each ray."""
    model = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 4))
    origin, target = torch.randn(batch, 1, 3), torch.rand(batch, 3)

    def step() -> torch.Tensor:
        points = (origin + torch.rand(batch, 16, 1)).flatten(0, 1)
        colour = model(points).unflatten(0, (batch, 16)).mean(1)
        return F.mse_loss(colour[:, :3], target)

    return model, step


@case(12)
def gan(batch: int) -> tuple[nn.Module, Step]:
    maker, judge = nn.Linear(8, 16), nn.Linear(16, 1)
    both, real = nn.ModuleList([maker, judge]), torch.randn(batch, 16)

    def step() -> torch.Tensor:
        judged = judge(torch.cat([real, maker(torch.randn(batch, 8))]))
        return F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))

    return both, step


@case(16)
def recommender(batch: int) -> tuple[nn.Module, Step]:
    tables = nn.ModuleList([nn.EmbeddingBag(100, 8) for _ in range(3)])
    top = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 1))
    bags = torch.randint(100, (batch, 5))

    def step() -> torch.Tensor:
        read = torch.cat([table(bags) for table in tables], 1)
        return F.binary_cross_entropy_with_logits(top(read)[:, 0], torch.ones(batch))

    return nn.ModuleList([tables, top]), step


@case(9)
def coordinates_need_gradients(batch: int) -> tuple[nn.Module, Step]:
    """As physics-informed networks ask for them."""
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))

    def step() -> torch.Tensor:
        x = torch.rand(batch, 2, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().mean()

    return model, step


@case(16)
def micro_batches(batch: int) -> tuple[nn.Module, Step]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 14 * 14, 4))
    x, y = torch.randn(batch, 3, 16, 16), torch.randint(4, (batch,))

    def step() -> torch.Tensor:
        F.cross_entropy(model(x), y).backward()
        return F.cross_entropy(model(x), y)

    return model, step


@case(7)
def compiled(batch: int) -> tuple[nn.Module, Step]:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
    faster = torch.compile(model, backend="aot_eager")
    x, y = torch.randn(batch, 16), torch.randint(10, (batch,))
    return model, lambda: F.cross_entropy(faster(x), y)


@case(5)
def distances(batch: int) -> tuple[nn.Module, Step]:
    """An input besides the batch: a mask over positions."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

        def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            read = self.words(tokens)
            scores = (read @ read.mT).masked_fill(mask, -1e9).softmax(-1)
            return self.head(scores @ read)

    model, tokens = Masked(), torch.randint(50, (batch, 12))
    mask = torch.ones(12, 12).triu(1).bool()
    return model, lambda: F.cross_entropy(model(tokens, mask).flatten(0, 1), tokens.flatten())


# Hugging Face's transformers: name -> (class, sizes of its configuration, batch, inputs).

_TOKENS = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_BERT = _TOKENS | {"intermediate_size": 64}
_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
_SMALL_T5 = {"vocab_size": 100, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_BART = {
    "vocab_size": 100,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_LLAMA = _BERT | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
LANGUAGE: dict[str, tuple[str, dict[str, Any], int]] = {
    "bert": ("BertForMaskedLM", _BERT, 16),
    "albert": ("AlbertForMaskedLM", _BERT | {"embedding_size": 16}, 6),
    "roberta": ("RobertaForMaskedLM", _BERT | {"max_position_embeddings": 64}, 10),
    "deberta": ("DebertaV2ForMaskedLM", _BERT, 6),
    "electra": ("ElectraForMaskedLM", _BERT | {"embedding_size": 16}, 12),
    "fnet": ("FNetForMaskedLM", _BERT, 16),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4}, 4),
    "gpt_neox": ("GPTNeoXForCausalLM", _BERT, 4),
    "opt": ("OPTForCausalLM", _TOKENS | {"ffn_dim": 64, "word_embed_proj_dim": 32}, 3),
    "llama": ("LlamaForCausalLM", _LLAMA, 5),
    "gemma2": ("Gemma2ForCausalLM", _LLAMA, 8),
    "qwen2": ("Qwen2ForCausalLM", _LLAMA, 8),
    "mixtral": ("MixtralForCausalLM", _LLAMA | {"num_local_experts": 2}, 4),
    "mamba": ("MambaForCausalLM", _TOKENS | {"state_size": 4}, 4),
    "t5": ("T5ForConditionalGeneration", _SMALL_T5 | {"d_kv": 8, "decoder_start_token_id": 0}, 6),
    "bart": ("BartForConditionalGeneration", _BART, 6),
    "xlnet": ("XLNetLMHeadModel", {"vocab_size": 100, "d_model": 32, "n_layer": 2, "n_head": 4}, 6),
}
PICTURES: dict[str, tuple[str, dict[str, Any], int, tuple[int, ...]]] = {
    "vit": ("ViTForImageClassification", _VIT, 12, (3, 32, 32)),
    "deit": ("DeiTForImageClassification", _VIT, 12, (3, 32, 32)),
    "dinov2": ("Dinov2ForImageClassification", _VIT, 6, (3, 32, 32)),
    "beit": ("BeitForImageClassification", _VIT, 6, (3, 32, 32)),
    "swin": (
        "SwinForImageClassification",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        6,
        (3, 32, 32),
    ),
    "swinv2": (
        "Swinv2ForImageClassification",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        6,
        (3, 32, 32),
    ),
    "resnet": (
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
        10,
        (3, 32, 32),
    ),
    "convnext": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
        10,
        (3, 64, 64),
    ),
    "videomae": (
        "VideoMAEForVideoClassification",
        _VIT | {"num_frames": 4},
        4,
        (4, 3, 32, 32),
    ),
    "timesformer": (
        "TimesformerForVideoClassification",
        _VIT | {"num_frames": 4},
        4,
        (4, 3, 32, 32),
    ),
    "vivit": (
        "VivitForVideoClassification",
        _VIT | {"num_frames": 4, "tubelet_size": [2, 8, 8]},
        4,
        (4, 3, 32, 32),
    ),
}


def _language(name: str, sizes: dict[str, Any]) -> Callable[[int], tuple[nn.Module, Step]]:
    def make(batch: int) -> tuple[nn.Module, Step]:
        import transformers

        kind = getattr(transformers, name)
        model = kind(kind.config_class(**sizes))
        tokens = torch.randint(3, 100, (batch, 24))
        return model, lambda: model(input_ids=tokens, labels=tokens).loss

    return make


def _pictures(
    name: str, sizes: dict[str, Any], shape: tuple[int, ...]
) -> Callable[[int], tuple[nn.Module, Step]]:
    def make(batch: int) -> tuple[nn.Module, Step]:
        import transformers

        kind = getattr(transformers, name)
        model = kind(kind.config_class(**sizes, num_labels=5))
        x, y = torch.randn(batch, *shape), torch.randint(5, (batch,))
        return model, lambda: model(pixel_values=x, labels=y).loss

    return make


def _transformers_cases() -> None:
    try:
        import transformers
    except ImportError:
        return
    for name, (kind, sizes, batch) in LANGUAGE.items():
        CASES[name] = (batch, _language(kind, sizes))
    for name, (kind, sizes, batch, shape) in PICTURES.items():
        CASES[name] = (batch, _pictures(kind, sizes, shape))

    @case(6)
    def wav2vec2(batch: int) -> tuple[nn.Module, Step]:
        config = transformers.Wav2Vec2Config(
            **_BERT, conv_dim=[16, 16], conv_stride=[5, 2], conv_kernel=[10, 3], num_labels=4,
            num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
        )  # fmt: skip
        model = transformers.Wav2Vec2ForSequenceClassification(config)
        sound, y = torch.randn(batch, 4_000), torch.randint(4, (batch,))
        return model, lambda: model(sound, labels=y).loss

    @case(5)
    def whisper(batch: int) -> tuple[nn.Module, Step]:
        config = transformers.WhisperConfig(
            **_BART, num_mel_bins=8, max_source_positions=50, decoder_start_token_id=1
        )
        model = transformers.WhisperForConditionalGeneration(config)
        sound, words = torch.randn(batch, 8, 100), torch.randint(3, 100, (batch, 12))
        return model, lambda: model(sound, labels=words).loss

    @case(7)
    def clip(batch: int) -> tuple[nn.Module, Step]:
        config = transformers.CLIPConfig(
            text_config=_BERT | {"max_position_embeddings": 32, "eos_token_id": 2},
            vision_config=_VIT, projection_dim=16,
        )  # fmt: skip
        model = transformers.CLIPModel(config)
        words, x = torch.randint(3, 100, (batch, 9)), torch.randn(batch, 3, 32, 32)
        return model, lambda: model(words, x, return_loss=True).loss

    @case(8)
    def patchtst(batch: int) -> tuple[nn.Module, Step]:
        config = transformers.PatchTSTConfig(
            num_input_channels=3, context_length=32, prediction_length=8, patch_length=4,
            patch_stride=4, d_model=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=4,
        )  # fmt: skip
        model = transformers.PatchTSTForPrediction(config)
        past, future = torch.randn(batch, 32, 3), torch.randn(batch, 8, 3)
        return model, lambda: model(past_values=past, future_values=future).loss

    @case(4)
    def mask_of_video(batch: int) -> tuple[nn.Module, Step]:
        config = transformers.VideoMAEConfig(
            **_VIT, num_frames=4, decoder_hidden_size=16, decoder_num_hidden_layers=1,
            decoder_num_attention_heads=2, decoder_intermediate_size=32,
        )  # fmt: skip
        model = transformers.VideoMAEForPreTraining(config)
        hidden = torch.zeros(batch, 2 * 16, dtype=torch.bool)
        hidden[:, :20] = True
        return model, lambda: model(torch.randn(batch, 4, 3, 32, 32), bool_masked_pos=hidden).loss


def _torchvision_cases() -> None:
    try:
        import torchvision.models as models
    except Exception:
        return

    def classifier(name: str, size: int) -> Callable[[int], tuple[nn.Module, Step]]:
        def make(batch: int) -> tuple[nn.Module, Step]:
            model = models.get_model(name, weights=None, num_classes=5)
            x, y = torch.randn(batch, 3, size, size), torch.randint(5, (batch,))
            return model, lambda: F.cross_entropy(model(x), y)

        return make

    for name in ("resnet18", "efficientnet_v2_s", "mobilenet_v3_small", "swin_v2_t", "vit_b_32"):
        CASES[f"tv_{name}"] = (6, classifier(name, 224 if name == "vit_b_32" else 64))

    def clips(name: str, frames: int, size: int) -> Callable[[int], tuple[nn.Module, Step]]:
        def make(batch: int) -> tuple[nn.Module, Step]:
            model = models.get_model(name, weights=None, num_classes=5)
            x, y = torch.randn(batch, 3, frames, size, size), torch.randint(5, (batch,))
            return model, lambda: F.cross_entropy(model(x), y)

        return make

    CASES["tv_r3d_18"] = (3, clips("r3d_18", 8, 64))
    CASES["tv_mvit_v2_s"] = (2, clips("mvit_v2_s", 16, 224))

    @case(3)
    def tv_raft(batch: int) -> tuple[nn.Module, Step]:
        model = models.optical_flow.raft_small()
        first, second = torch.rand(batch, 3, 128, 128), torch.rand(batch, 3, 128, 128)
        return model, lambda: model(first, second, num_flow_updates=2)[-1].abs().mean()

    @case(3)
    def tv_fasterrcnn(batch: int) -> tuple[nn.Module, Step]:
        model = models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
            weights=None, weights_backbone=None, num_classes=4
        )
        pictures = [torch.rand(3, 96, 96) for _ in range(batch)]
        boxes = torch.tensor([[5.0, 5.0, 40.0, 40.0], [20.0, 30.0, 80.0, 90.0]])
        targets = [{"boxes": boxes, "labels": torch.tensor([1, 2])} for _ in range(batch)]
        return model, lambda: sum(model(pictures, targets).values(), torch.zeros(()))

    @case(4)
    def tv_deeplab(batch: int) -> tuple[nn.Module, Step]:
        model = models.segmentation.deeplabv3_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=4
        )
        x, y = torch.randn(batch, 3, 64, 64), torch.randint(4, (batch, 64, 64))
        return model, lambda: F.cross_entropy(model(x)["out"], y)


def _graph_cases() -> None:
    try:
        from torch_geometric.nn import GCNConv, GINConv, global_add_pool
    except Exception:
        return

    def graphs(batch: int, nodes: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
        """Which graph each node is of, and edges."""
        of_graph = torch.arange(batch).repeat_interleave(nodes)
        source = torch.arange(batch * nodes)
        target = source // nodes * nodes + (source + 1) % nodes
        return of_graph, torch.stack([source, target])

    class Net(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.first = (
                GCNConv(16, 32) if kind == "gcn" else GINConv(nn.Sequential(nn.Linear(16, 32)))
            )
            self.head = nn.Linear(32, 3)

        def forward(self, x: torch.Tensor, edges: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
            return self.head(global_add_pool(self.first(x, edges).relu(), of))

    for kind in ("gcn", "gin"):

        def make(batch: int, kind: str = kind) -> tuple[nn.Module, Step]:
            model = Net(kind)
            of, edges = graphs(batch)
            x, y = torch.randn(len(of), 16), torch.randint(3, (batch,))
            return model, lambda: F.cross_entropy(model(x, edges, of), y)

        CASES[f"pyg_{kind}"] = (11, make)


# Every case, captured and asked.


def ask(name: str, folder: Path) -> tuple[int, list[tuple[str, BatchReading | None]]]:
    batch, make = CASES[name]
    torch.manual_seed(0)
    model, step = make(batch)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with stepscope.watch(folder, step_on="auto", wait=2, warmup=1, active=2):
        for _ in range(9):
            optimizer.zero_grad()
            step().backward()
            optimizer.step()
    from stepscope.trace.read import read_rank_inputs

    rank = next(folder.glob("rank-*"))
    analysis = RankAnalysis(read_rank_inputs(next(rank.glob("trace*"))))
    bare = find_batch(analysis.trace, analysis.forward_calls)
    return batch, [("run folder", read_batch(analysis)), ("bare trace", bare)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    _transformers_cases()
    _torchvision_cases()
    _graph_cases()
    counts = {"right": 0, "refused": 0, "WRONG": 0}
    rows = []
    for name in options.names or CASES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                batch, readings = ask(name, Path(folder) / "run")
            except Exception as error:
                print(f"{name:24} not asked: {type(error).__name__}: {str(error)[:80]}")
                continue
        for source, reading in readings:
            answer = reading.sure if reading else None
            verdict = "refused" if answer is None else "right" if answer == batch else "WRONG"
            counts[verdict] += 1
            why = "nothing shows it"
            if reading is not None:
                why = reading.doubt or reading.read_from
            print(f"{name:24} {source:11} {batch:4} -> {answer or '-':>5} {verdict:8} {why}")
            rows.append({"model": name, "source": source, "verdict": verdict, "why": why})
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    sys.exit(bool(counts["WRONG"]))


if __name__ == "__main__":
    main()
