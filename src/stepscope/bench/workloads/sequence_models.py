"""Models of sequences: translation with LSTM layers and by the Transformer, BERT's masked
words, a recurrent network over a long stream of bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from stepscope.bench.workload import Config, Target, TrainingPlace, TrainingWorkload
from stepscope.bench.workloads.building_blocks import (
    Labelled,
    attend,
    class_loss,
    feed_forward,
    in_batches,
    in_sizes,
    train_on,
    words_loss,
)
from stepscope.bench.workloads.language_models import make_texts

# Translation with LSTM layers: the decoder attends to the source at every word, in a loop.

START = 0  # the word that every target begins with


class AttentionDecoder(nn.Module):
    """Each word's input holds the attention of the word before: time steps cannot run at once."""

    def __init__(self, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.width = width
        self.cells = nn.ModuleList(
            nn.LSTMCell(width if layer else 2 * width, width) for layer in range(layers)
        )
        self.join = nn.Linear(2 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, words: torch.Tensor, source: torch.Tensor, hidden: torch.Tensor, memory: torch.Tensor
    ) -> torch.Tensor:
        states = list(zip(hidden.unbind(), memory.unbind(), strict=True))
        attended = torch.zeros_like(words[:, 0])
        outputs = []
        for word in words.unbind(1):
            x = torch.cat((word, attended), 1)
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(self.dropout(x), states[layer])
                x = states[layer][0]
            attended = self.attend(x, source)
            outputs.append(attended)
        return torch.stack(outputs, 1)

    def attend(self, query: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        weights = torch.bmm(source, query.unsqueeze(2)).softmax(1).to(source.dtype)
        context = torch.bmm(weights.transpose(1, 2), source).squeeze(1)
        return torch.tanh(self.join(torch.cat((context, query), 1)))


class TranslationLSTM(nn.Module):
    """The source's last states start the decoder."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, layers = config.width, config.layers
        self.source_words = nn.Embedding(config.words, width)
        self.target_words = nn.Embedding(config.words, width)
        self.encoder = nn.LSTM(width, width, layers, batch_first=True, dropout=config.dropout)
        self.decoder = AttentionDecoder(width, layers, config.dropout)
        self.output = nn.Linear(width, config.words, bias=False)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        outputs, (hidden, memory) = self.encoder(self.source_words(source))
        return self.output(self.decoder(self.target_words(target), outputs, hidden, memory))


def make_pairs(config: Config, place: TrainingPlace) -> list[Labelled]:
    """Return source and target: the target has, word for word, the vocabulary in reverse."""
    sources = (ids[:, 1:] for ids in make_texts(config, place))
    return [(source, config.known - 1 - source) for source in sources]


def translation_loss(
    model: nn.Module, batch: Labelled, *, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Compare each word with what the decoder says after the words before it."""
    source, target = batch
    before = functional.pad(target[:, :-1], (1, 0), value=START)
    return words_loss(model(source, before), target, label_smoothing=label_smoothing)


LUONG = {
    "batch": 128, "batches": 8, "length": 50, "words": 50000, "known": 1000, "width": 1000,
    "layers": 4, "dropout": 0.2, "lr": 1e-3,
}  # fmt: skip
NMT_LSTM_TINY = {
    "batch": 16, "length": 8, "words": 32, "known": 32, "width": 64, "layers": 2, "lr": 5e-3,
    "dropout": 0.0,
}  # fmt: skip
NMT_LSTM_WORKLOAD = TrainingWorkload(
    name="nmt-lstm",
    task="translation",
    source="Luong et al., Effective Approaches to Attention-based Neural Machine Translation, 2015",
    samples="sentences",
    sizes=in_sizes(LUONG, tiny=NMT_LSTM_TINY, small={"batch": 64, "length": 25}),
    targets={"tiny": Target(1.2, 60), "small": Target(9.0, 60), "paper": Target(9.0, 60)},
    build=train_on(make_pairs, TranslationLSTM, loss=translation_loss, clip=5.0),
    tags=frozenset({"recurrent", "attention"}),
)


# The Transformer's base model: translation with encoder and decoder, norms after each part.


class MultiHeadAttention(nn.Module):
    """Queries from one sequence, keys and values from the same or another one."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.join = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, seen: torch.Tensor, *, causal: bool = False) -> torch.Tensor:
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in (self.query(x), self.key(seen), self.value(seen))
        )
        dropout = self.dropout if self.training else 0.0
        return self.join(attend(query, key, value, dropout_p=dropout, is_causal=causal))


class EncoderLayer(nn.Module):
    """Attention and a feed-forward layer; each is added to its input, then the norm follows."""

    def __init__(self, config: Config, activation: nn.Module) -> None:
        super().__init__()
        width = config.width
        self.attention = MultiHeadAttention(width, config.heads, config.attention_dropout)
        self.feed = feed_forward(width, 4 * width, activation)
        self.after_attention, self.after_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
        mixed = self.attention(x, x if seen is None else seen)
        x = self.after_attention(x + self.dropout(mixed))
        return self.after_feed(x + self.dropout(self.feed(x)))


class DecoderLayer(nn.Module):
    """Attends to the words before; then, as an encoder's layer, to the source."""

    def __init__(self, config: Config, activation: nn.Module) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(config.width, config.heads, config.attention_dropout)
        self.after_attention = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.to_source = EncoderLayer(config, activation)

    def forward(self, x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        x = self.after_attention(x + self.dropout(self.attention(x, x, causal=True)))
        return self.to_source(x, source)


class TranslationTransformer(nn.Module):
    """One table of words for source, target and output."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.words = nn.Embedding(config.words, config.width)
        layers = range(config.layers)
        self.encoder = nn.ModuleList(EncoderLayer(config, nn.ReLU()) for _ in layers)
        self.decoder = nn.ModuleList(DecoderLayer(config, nn.ReLU()) for _ in layers)
        self.dropout = nn.Dropout(config.dropout)
        self.register_buffer("waves", waves(config.length, config.width))
        nn.init.normal_(self.words.weight, std=config.width**-0.5)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x, y = self.embed(source), self.embed(target)
        for layer in self.encoder:
            x = layer(x)
        for layer in self.decoder:
            y = layer(y, x)
        return functional.linear(y, self.words.weight)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        words = self.words(ids) * self.words.embedding_dim**0.5
        return self.dropout(words + self.waves[: ids.shape[1]])


def waves(length: int, width: int) -> torch.Tensor:
    """Write where a word stands as sines and cosines from fast to slow."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000) / width))
    angles = torch.arange(length)[:, None] * rates
    return torch.stack((angles.sin(), angles.cos()), 2).flatten(1)


# A batch has 25 000 words of source and of target.
BASE = {
    "batch": 784, "batches": 4, "length": 32, "words": 37000, "known": 1000, "width": 512,
    "heads": 8, "layers": 6, "dropout": 0.1, "attention_dropout": 0.0, "lr": 2e-4,
}  # fmt: skip
TRANSFORMER_TINY = {
    "batch": 32, "length": 8, "words": 32, "known": 32, "width": 64, "heads": 4, "layers": 2,
    "lr": 3e-3,
}  # fmt: skip
TRANSFORMER_WORKLOAD = TrainingWorkload(
    name="transformer",
    task="translation",
    source="Vaswani et al., Attention Is All You Need, 2017 (base model)",
    samples="sentences",
    sizes=in_sizes(BASE, tiny=TRANSFORMER_TINY, small={"batch": 128}),
    targets={"tiny": Target(1.5, 60), "small": Target(9.0, 60), "paper": Target(9.0, 60)},
    build=train_on(
        make_pairs,
        TranslationTransformer,
        partial(torch.optim.Adam, betas=(0.9, 0.98), eps=1e-9),
        partial(translation_loss, label_smoothing=0.1),
    ),
    tags=frozenset({"attention"}),
)


# BERT medium: masked words, and whether the second sentence follows the first.

BEGIN, END, MASK, SPECIAL = 0, 1, 2, 3  # words from SPECIAL on are of the text


class Bert(nn.Module):
    """The encoder and both heads: only the masked places are compared with the vocabulary."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.words = nn.Embedding(config.words, width)
        self.places = nn.Embedding(max(512, config.length), width)
        self.sentences = nn.Embedding(2, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(config.dropout)
        layers = (EncoderLayer(config, nn.GELU()) for _ in range(config.layers))
        self.layers = nn.Sequential(*layers)
        self.masked = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.word_bias = nn.Parameter(torch.zeros(config.words))
        self.follows = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(
        self, ids: torch.Tensor, sentences: torch.Tensor, masked_at: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.words(ids) + self.places(places) + self.sentences(sentences)
        x = self.layers(self.dropout(self.norm(x)))
        masked = x.gather(1, masked_at.unsqueeze(2).expand(-1, -1, x.shape[2]))
        words = functional.linear(self.masked(masked), self.words.weight, self.word_bias)
        return words, self.follows(x[:, 0])


class MaskedPairs(NamedTuple):
    """One batch."""

    ids: torch.Tensor
    sentences: torch.Tensor  # 0 or 1 for each place
    masked_at: torch.Tensor  # as many in each pair
    masked_words: torch.Tensor
    follows: torch.Tensor


def make_batch(config: Config, draw: torch.Generator) -> MaskedPairs:
    """Draw sentences with words of one topic; the sentence that follows has the same topic."""
    pairs, length, half, device = config.batch, config.length, config.length // 2, draw.device

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=draw, device=device)

    topics = (random(pairs, 2) * config.topics).long()
    follows = (random(pairs) < 0.5).long()
    topics[:, 1] = torch.where(follows == 1, topics[:, 0], topics[:, 1])
    sentences = (torch.arange(length, device=device) >= half).long().expand(pairs, -1)
    a_topic = config.known // config.topics
    rare = (random(pairs, length) ** 4 * a_topic).long()
    ids = SPECIAL + topics.gather(1, sentences) * a_topic + rare
    ids[:, 0], ids[:, half - 1], ids[:, -1] = BEGIN, END, END
    text = (ids >= SPECIAL).float()
    masked_at = (random(pairs, length) * text).topk(config.masked, 1).indices
    masked_words = ids.gather(1, masked_at)
    return MaskedPairs(ids.scatter(1, masked_at, MASK), sentences, masked_at, masked_words, follows)


def masked_loss(model: nn.Module, batch: MaskedPairs) -> torch.Tensor:
    words, follows = model(batch.ids, batch.sentences, batch.masked_at)
    which_follow = functional.cross_entropy(follows.float(), batch.follows)
    return words_loss(words, batch.masked_words) + which_follow


@in_batches
def make_masked_pairs(config: Config, draw: torch.Generator) -> Iterator[MaskedPairs]:
    while True:
        yield make_batch(config, draw)


build_bert = train_on(make_masked_pairs, Bert, torch.optim.AdamW, masked_loss)

# The length is that of nine tenths of the published training.
BERT_MEDIUM = {
    "batch": 256, "batches": 8, "length": 128, "masked": 20, "words": 30522, "known": 2000,
    "topics": 16, "width": 512, "heads": 8, "layers": 8, "dropout": 0.1, "attention_dropout": 0.1,
    "lr": 2e-4,
}  # fmt: skip
BERT_TINY = {
    "batch": 16, "length": 32, "masked": 5, "words": 67, "known": 64, "topics": 8, "width": 64,
    "heads": 4, "layers": 2, "attention_dropout": 0.0, "lr": 2e-3,
}  # fmt: skip
BERT_MEDIUM_WORKLOAD = TrainingWorkload(
    name="bert-medium",
    task="language model",
    source="Turc et al., Well-Read Students Learn Better, 2019 (BERT medium, 41.7 M)",
    samples="sentence pairs",
    sizes=in_sizes(BERT_MEDIUM, tiny=BERT_TINY, small={"batch": 64}),
    targets={"tiny": Target(3.5, 60), "small": Target(10.0, 60), "paper": Target(10.0, 60)},
    build=build_bert,
    tags=frozenset({"attention"}),
)


# BERT large: bert-medium's training with the published large model.

BERT_LARGE = {**BERT_MEDIUM, "width": 1024, "heads": 16, "layers": 24, "lr": 1e-4}
BERT_LARGE_WORKLOAD = TrainingWorkload(
    name="bert-large",
    task="language model",
    source="Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers, 2018 (340 M)",
    samples="sentence pairs",
    sizes=in_sizes(BERT_LARGE, tiny={**BERT_TINY, "heads": 8, "layers": 3}, small={"batch": 16}),
    targets={"tiny": Target(3.5, 60), "small": Target(10.0, 60), "paper": Target(10.0, 60)},
    build=build_bert,
    tags=frozenset({"attention"}),
)


# A plain recurrent network over a long stream of bits: how often is a bit one?

RATES = 10  # classes: bits are one with a chance of 5%, 15% ... 95%


class BitStreamRNN(nn.Module):
    """The last state of the stream gives the class."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.recurrent = nn.RNN(1, config.width, batch_first=True)
        self.output = nn.Linear(config.width, RATES)

    def forward(self, bits: torch.Tensor) -> torch.Tensor:
        states, _ = self.recurrent(bits)
        return self.output(states[:, -1])


@in_batches
def make_streams(config: Config, draw: torch.Generator) -> Iterator[Labelled]:
    """Bits whose rate of ones follows from the class."""
    device = draw.device
    while True:
        classes = torch.randint(RATES, (config.batch,), generator=draw, device=device)
        rates = (0.05 + classes / RATES).view(-1, 1, 1)
        bits = torch.rand((config.batch, config.length, 1), generator=draw, device=device) < rates
        yield bits.float(), classes


BPPSA = {"batch": 16, "batches": 16, "length": 1000, "width": 20, "lr": 1e-2}
LONG_RNN_WORKLOAD = TrainingWorkload(
    name="long-rnn",
    task="classification of bit streams",
    source="Wang et al., BPPSA: Scaling Back-propagation by Parallel Scan Algorithm, 2020",
    samples="streams",
    sizes=in_sizes(BPPSA, tiny={"batch": 64, "length": 64}, small={"batch": 256}),
    targets={"tiny": Target(2.0, 60), "small": Target(2.1, 60), "paper": Target(2.2, 60)},
    # A long stream's gradient can explode.
    build=train_on(make_streams, BitStreamRNN, loss=class_loss, clip=1.0),
    tags=frozenset({"recurrent"}),
)
