"""Random stand-ins for the data sets that the scripts of field.toml need, a few MB in all.

python benchmarks/field_data.py FOLDER        writes FOLDER/data

Shapes, file names and formats are those of the real sets; contents are drawn with a fixed seed.
"""

from __future__ import annotations

import csv
import json
import random
import string
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

SEED = 0
WORDS = [a + b + c for a in "bdklmnrst" for b in "aeiou" for c in ("", "n", "r", "st")]


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        raise SystemExit("python benchmarks/field_data.py FOLDER: an existing folder, one argument")
    data = Path(sys.argv[1]) / "data"
    write_digits(data / "mnist", train=1280, test=200)
    write_digits(data / "mnist-few", train=320, test=40)
    write_images(data / "imagenet", train=48, val=16, side=64)
    write_pets(data / "pets", count=40, side=64)
    write_super_resolution(data / "bsds", train=24, test=4)
    write_segmentation(data / "carvana", count=24, side=64)
    write_words(data / "wikitext", tokens=24_000)
    write_lines(data / "names.txt", count=600)
    write_plays(data / "plays.txt", characters=60_000)
    write_citations(data / "cora", papers=600, edges=1500)
    write_sentence_pairs(data / "pairs", count=240)
    write_tiny_language_model(data / "tiny-gpt2")
    write_tiny_classifier(data / "tiny-bert")
    print(f"{data}: {sum(1 for path in data.rglob('*') if path.is_file())} files")


def write_digits(folder: Path, *, train: int, test: int) -> None:
    """MNIST's four files, uncompressed."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(SEED)
    for prefix, count in (("train", train), ("t10k", test)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        head = struct.pack(">4i", 2051, count, 28, 28)
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        head = struct.pack(">2i", 2049, count)
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())


def write_images(folder: Path, *, train: int, val: int, side: int) -> None:
    """One folder per class, as ImageFolder reads it."""
    for split, count in (("train", train), ("val", val)):
        for number in range(count):
            _picture(folder / split / f"class{number % 2}" / f"{number}.jpg", side, number)


def write_pets(folder: Path, *, count: int, side: int) -> None:
    """The class is in the name: breed_number.jpg."""
    for number in range(count):
        _picture(folder / f"breed{number % 3}_{number}.jpg", side, number)


def write_super_resolution(folder: Path, *, train: int, test: int) -> None:
    for split, count in (("train", train), ("test", test)):
        for number in range(count):
            _picture(folder / "BSDS300" / "images" / split / f"{number}.jpg", 256, number)


def write_segmentation(folder: Path, *, count: int, side: int) -> None:
    """Pictures, each with a mask of zeros and ones."""
    rng = np.random.default_rng(SEED)
    for number in range(count):
        _picture(folder / "imgs" / f"{number:03d}.jpg", side, number)
        mask = rng.integers(0, 2, (side, side), dtype=np.uint8)
        mask[0, :2] = 0, 1
        _save(folder / "masks" / f"{number:03d}_mask.gif", mask)


def write_words(folder: Path, *, tokens: int) -> None:
    """train, valid and test in words, one sentence per line."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", tokens), ("valid", tokens // 10), ("test", tokens // 10)):
        lines = (f" {_sentence(SEED + n, 19)} " for n in range(count // 20))
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")


def write_lines(path: Path, *, count: int) -> None:
    """One invented name per line."""
    path.write_text("\n".join(_sentence(n, 2).replace(" ", "") for n in range(count)) + "\n")


def write_plays(path: Path, *, characters: int) -> None:
    lines = [f"{string.printable.strip()}\n"]  # so that every letter occurs
    while sum(len(text) for text in lines) < characters:
        lines.append(f"{_sentence(len(lines), 8).capitalize()}.\n")
    path.write_text("".join(lines))


def write_citations(folder: Path, *, papers: int, edges: int) -> None:
    """Cora's two files: 1433 words and a class for each paper; who cites whom."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(SEED)
    classes = ["Case_Based", "Genetic_Algorithms", "Neural_Networks", "Probabilistic_Methods"]
    classes += ["Reinforcement_Learning", "Rule_Learning", "Theory"]
    with (folder / "cora.content").open("w") as out:
        for paper in range(papers):
            words = "\t".join(map(str, (rng.random(1433) < 0.02).astype(int)))
            out.write(f"{paper}\t{words}\t{classes[paper % 7]}\n")
    pairs = rng.integers(0, papers, (edges, 2))
    (folder / "cora.cites").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))


def write_sentence_pairs(folder: Path, *, count: int) -> None:
    """MRPC's columns in csv files named by split."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in (("train", count), ("validation", count // 10), ("test", count // 10)):
        with (folder / f"{split}.csv").open("w", newline="") as out:
            table = csv.writer(out)
            table.writerow(("sentence1", "sentence2", "label", "idx"))
            for n in range(rows):
                table.writerow((_sentence(n, 12), _sentence(n + 1, 12), n % 2, n))


def write_tiny_language_model(folder: Path) -> None:
    """A tokenizer of whole words and a GPT-2 configuration with two small layers."""
    _word_tokenizer(
        folder, {"bos_token": "<|end|>", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    )
    config: dict[str, Any] = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    config |= {
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 64,
        "n_positions": 128,
        "vocab_size": len(WORDS) + 8,
    }
    (folder / "config.json").write_text(json.dumps(config))


def write_tiny_classifier(folder: Path) -> None:
    """The same tokenizer with BERT's special words, and a BERT configuration of two layers."""
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    _word_tokenizer(folder, special | {"mask_token": "[MASK]"})
    config: dict[str, Any] = {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
    }
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}
    config |= {"intermediate_size": 128, "vocab_size": len(WORDS) + 8}
    (folder / "config.json").write_text(json.dumps(config))


def _word_tokenizer(folder: Path, special: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    added = list(dict.fromkeys((*special.values(), "[UNK]")))
    vocabulary = {word: n for n, word in enumerate((*added, *dict.fromkeys(WORDS)))}
    content = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": n, "content": word, "special": True, **content} for n, word in enumerate(added)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 128}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "unk_token": "[UNK]", **special})
    )


def _sentence(seed: int, length: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=length))


def _picture(path: Path, side: int, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    _save(path, pixels)


def _save(path: Path, pixels: np.ndarray[Any, Any]) -> None:
    try:
        from PIL import Image  # type: ignore[import-not-found]
    except ImportError:
        raise SystemExit("pictures need Pillow: pip install pillow") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


if __name__ == "__main__":
    main()
