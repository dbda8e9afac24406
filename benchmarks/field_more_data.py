"""Random stand-ins for the data sets that the scripts of field_more.toml need.

python benchmarks/field_more_data.py FOLDER        adds to FOLDER/data, after field_data.py
"""

from __future__ import annotations

import gzip
import json
import random
import shutil
import sys
import wave
from pathlib import Path

import numpy as np

from field_data import SEED, WORDS, write_citations, write_digits

WORKLOADS = Path(__file__).parent / "workloads"


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        raise SystemExit("python benchmarks/field_more_data.py FOLDER: an existing folder")
    data = Path(sys.argv[1]) / "data"
    data.mkdir(exist_ok=True)
    shutil.copyfile(WORKLOADS / "old_gym.py", data / "old_gym.py")
    write_digits(data / "mnist-more", train=9600, test=400)
    write_citations(data / "cora-full", papers=2708, edges=5429)
    write_citations(data / "cora-1500", papers=1500, edges=3000)
    write_ratings(data / "ratings", users=300, items=400, each=30)
    write_series(data / "ett.csv", rows=3000, columns=7)
    write_load(data / "load.txt", rows=2500, columns=8)
    write_load(data / "nasdaq.csv", rows=400, columns=20, names=True)
    write_characters(data / "omniglot.npy", classes=120)
    write_speakers(data / "speakers", count=120)
    write_commands(data / "commands", each=24)
    write_mixtures(data / "mixtures", count=60)
    write_pairs(data / "corpus.txt", lines=4000)
    write_graphs(data / "graphs.txt", count=188)
    write_letters(data / "letters.gz", size=400_000)
    print(f"{data}: {sum(1 for path in data.rglob('*') if path.is_file())} files")


def write_ratings(folder: Path, *, users: int, items: int, each: int) -> None:
    """Who rated what, in the three forms that public recommenders read."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(SEED)
    rows = [(u, int(i)) for u in range(users) for i in rng.permutation(items)[:each]]
    rows.append((users - 1, items - 1))
    stars = rng.integers(1, 6, len(rows))
    rated = enumerate(zip(rows, stars, strict=True))
    lines = (f"{user + 1}::{item + 1}::{star}::{n}\n" for n, ((user, item), star) in rated)
    (folder / "ratings.dat").write_text("".join(lines))
    (folder / "sequences.txt").write_text("".join(f"{u + 1} {i + 1}\n" for u, i in rows))
    (folder / "train.rating").write_text("".join(f"{u}\t{i}\t5\t0\n" for u, i in rows))
    others = ["\t".join(map(str, rng.integers(0, items, 99))) for _ in range(users)]
    held = [f"({u},{int(rng.integers(0, items))})\t{others[u]}\n" for u in range(users)]
    (folder / "test.negative").write_text("".join(held))


def write_series(path: Path, *, rows: int, columns: int) -> None:
    """An hourly csv as the ETT sets are: a date, then one column a variable."""
    values = np.random.default_rng(SEED).standard_normal((rows, columns)).cumsum(0) / 10
    hours = np.datetime64("2016-07-01T00") + np.arange(rows)
    names = [*(f"V{n}" for n in range(columns - 1)), "OT"]
    lines = [f"date,{','.join(names)}"]
    for hour, row in zip(hours, values, strict=True):
        lines.append(f"{str(hour).replace('T', ' ')}:00:00,{','.join(f'{v:.3f}' for v in row)}")
    path.write_text("\n".join(lines) + "\n")


def write_load(path: Path, *, rows: int, columns: int, names: bool = False) -> None:
    """Numbers, one hour a row; with names, the last is the index that others predict."""
    head = ",".join([*(f"S{n}" for n in range(columns - 1)), "NDX"]) if names else ""
    values = np.random.default_rng(SEED).random((rows, columns))
    np.savetxt(path, values, "%.4f", ",", header=head, comments="")


def write_characters(path: Path, *, classes: int) -> None:
    """Omniglot as one array: 20 drawings of each letter."""
    rng = np.random.default_rng(SEED)
    np.save(path, rng.integers(0, 2, (classes, 20, 1, 28, 28), dtype=np.uint8))


def write_speakers(folder: Path, *, count: int) -> None:
    """A file a speaker: 20 utterances of 180 frames of 40 mel bands."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(SEED)
    for number in range(count):
        spectra = rng.standard_normal((20, 40, 180)).astype(np.float32)
        np.save(folder / f"speaker{number}.npy", spectra)


def write_commands(folder: Path, *, each: int) -> None:
    """A second of sound a file, one folder a word; and background noise."""
    for split, count in (("train", each), ("valid", 2)):
        for number, word in enumerate(("yes", "no", "up", "down", "left", "right")):
            for n in range(count):
                _sound(folder / split / word / f"{n}.wav", 16000, 16000, number * 1000 + n)
    _sound(folder / "train" / "_background_noise_" / "noise.wav", 160000, 16000, 1)


def write_mixtures(folder: Path, *, count: int) -> None:
    """Two speakers and their mix at 8 kHz, with lists of files and lengths."""
    for split, files in (("tr", count), ("cv", 4)):
        for part, shift in (("mix", 0), ("s1", 1), ("s2", 2)):
            listed = []
            for n in range(files):
                path = folder / "wav" / split / part / f"{n}.wav"
                _sound(path, 8000, 8000, 10 * n + shift)
                listed.append([f"mixtures/wav/{split}/{part}/{n}.wav", 8000])
            home = folder / split
            home.mkdir(parents=True, exist_ok=True)
            (home / f"{part}.json").write_text(json.dumps(listed))


def write_pairs(path: Path, *, lines: int) -> None:
    """Two sentences a line, with a tab between them."""
    draw = random.Random(SEED)
    pairs = ([" ".join(draw.choices(WORDS, k=10)) for _ in range(2)] for _ in range(lines))
    path.write_text("".join("\t".join(pair) + "\n" for pair in pairs))


def write_graphs(path: Path, *, count: int) -> None:
    """Labelled graphs of 10 to 25 nodes: a line a node, with its tag and its neighbours."""
    rng = random.Random(SEED)
    lines = [str(count)]
    for number in range(count):
        nodes = rng.randint(10, 25)
        lines.append(f"{nodes} {number % 2}")
        for node in range(nodes):
            near = sorted({(node + 1) % nodes, (node - 1) % nodes})
            lines.append(" ".join(map(str, (node % 7, len(near), *near))))
    path.write_text("\n".join(lines) + "\n")


def write_letters(path: Path, *, size: int) -> None:
    """Compressed text of `size` bytes."""
    draw = random.Random(SEED)
    text = " ".join(draw.choices(WORDS, k=size // 3)).encode()[:size]
    with gzip.open(path, "wb") as out:
        out.write(text.ljust(size))


def _sound(path: Path, samples: int, rate: int, seed: int) -> None:
    noise = np.random.default_rng(seed).integers(-8000, 8000, samples, dtype=np.int16)
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(noise.tobytes())


if __name__ == "__main__":
    main()
