"""The guard of processor time holds still for noise, and fails for work that was added."""

import sys
from pathlib import Path

import guard

EQUAL = [(1.0, 1.02), (1.1, 1.0), (1.0, 1.3)]


def package(folder: Path, rounds: int) -> Path:
    own = folder / "stepscope"
    own.mkdir(parents=True)
    (own / "__init__.py").touch()
    (own / "__main__.py").write_text(f"sum(range({rounds}))\n")
    return folder


def test_one_slow_turn_is_noise() -> None:
    assert not guard.is_worse(EQUAL)


def test_every_turn_slower_is_worse() -> None:
    assert guard.is_worse([(before, 1.2 * before) for before, _ in EQUAL])


def test_added_work_fails(tmp_path, monkeypatch, capsys) -> None:
    before = package(tmp_path / "before", 10)
    now = package(tmp_path / "now", 20_000_000)
    words = [
        "guard",
        "--since",
        str(before),
        "--ours",
        str(now),
        "--only=--help",
        "--turns",
        "2",
    ]
    monkeypatch.setattr(sys, "argv", words)
    assert guard.main() == 1
    assert "worse: --help" in capsys.readouterr().out


def test_the_same_work_passes(tmp_path, monkeypatch) -> None:
    same = package(tmp_path / "same", 2_000_000)
    words = ["guard", "--since", str(same), "--ours", str(same), "--only=--help", "--turns", "2"]
    monkeypatch.setattr(sys, "argv", words)
    assert guard.main() == 0


def test_a_commit_that_is_not_here_is_no_failure(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["guard", "--since", "no-such-commit"])
    assert guard.main() == 0
    assert "skipped" in capsys.readouterr().out
