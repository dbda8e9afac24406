"""A file that is written again when nothing else can be."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from stepscope.measure.folder import KeptJson


@pytest.fixture
def kept(tmp_path: Path) -> KeptJson:
    file = KeptJson(tmp_path / "a.json")
    file.write({"status": "running"})
    return file


def refuse(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refused(*_: Any, **__: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refused)


def content(file: KeptJson) -> Any:
    return json.loads(file.path.read_text())


def test_it_takes_a_block_until_its_last_writing(kept: KeptJson) -> None:
    assert kept.path.stat().st_size == 4096
    kept.write({"status": "finished"}, last=True)
    assert kept.path.read_text() == '{"status": "finished"}'
    assert [file.name for file in kept.path.parent.iterdir()] == ["a.json"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.EROFS])
def test_where_no_other_file_can_be_made_it_is_written_over(
    kept: KeptJson, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    refuse(monkeypatch, number)
    kept.write({"long": "x" * 5000}, {"short": "y"}, last=True)
    monkeypatch.undo()
    assert content(kept) == {"short": "y"}


def test_what_fits_in_no_version_is_an_error_and_leaves_the_last(
    kept: KeptJson, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        kept.write({"long": "x" * 5000})
    monkeypatch.undo()
    assert content(kept) == {"status": "running"}


def test_a_number_that_belongs_to_another_file_by_now_is_left_alone(
    kept: KeptJson, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert kept._file is not None
    os.close(kept._file)
    theirs = os.open(tmp_path / "theirs", os.O_RDWR | os.O_CREAT)
    assert theirs == kept._file
    refuse(monkeypatch, errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        kept.write({"status": "finished"}, last=True)
    assert os.fstat(theirs).st_size == 0
    os.close(theirs)


def test_anothers_file_is_never_taken(kept: KeptJson) -> None:
    with pytest.raises(FileExistsError):
        KeptJson(kept.path).write({"status": "mine"})
    assert content(kept) == {"status": "running"}
