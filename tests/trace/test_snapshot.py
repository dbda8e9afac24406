"""CUDA memory snapshots: read without running anything, refused where they are not plain data."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import pickletools
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import snapshots
from stepscope.errors import UnreadableInputError
from stepscope.records.memory import ACTIONS, BLOCK_STATES
from stepscope.trace.discover import find_traces
from stepscope.trace.files import is_pickle
from stepscope.trace.formats import plain_pickle
from stepscope.trace.formats.plain_pickle import load_plain
from stepscope.trace.formats.snapshot import is_snapshot, read_snapshot
from stepscope.trace.read import read_trace

PLAIN_TYPES = (dict, list, tuple, str, int, float, bool, type(None), bytes)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(value=PLAIN, protocol=st.integers(0, 5))
def test_plain_data_comes_back_as_it_was(value, protocol):
    assert load_plain(pickle.dumps(value, protocol), "x")[0] == value


@given(value=st.binary(), protocol=st.integers(3, 5))
def test_bytes_are_plain_where_the_protocol_knows_them(value, protocol):
    assert load_plain(pickle.dumps([value], protocol), "x")[0] == [value]


@pytest.mark.parametrize("protocol", range(6))
def test_a_snapshot_of_any_protocol_is_recognised_and_read(tmp_path, protocol):
    path = snapshots.write(tmp_path / "no-ending", snapshots.training().snapshot(), protocol)
    assert is_snapshot(path)
    found = read_snapshot(path)
    assert len(found.segments) == 2
    assert found.blocks.size_bytes.sum() == found.segments.total_bytes.sum()
    (history,) = found.histories
    counts = np.bincount(history.action, minlength=len(ACTIONS))
    assert dict(zip(ACTIONS, counts.tolist(), strict=True)) == {
        "alloc": 7,
        "free_requested": 6,
        "free_completed": 6,
        "segment_alloc": 2,
        "segment_free": 0,
        "segment_map": 0,
        "segment_unmap": 0,
        "oom": 0,
        "snapshot": 1,
        "unknown": 0,
    }
    held = found.blocks.state == BLOCK_STATES.index("active_allocated")
    assert found.blocks.requested_bytes[held].tolist() == [3_000_000]
    assert found.stacks[found.blocks.stack[held][0]][0] == ("/home/me/train.py", 8, "load")


def test_segments_alone_as_memory_snapshot_gives_them_will_do(tmp_path):
    path = snapshots.write(tmp_path / "s.pickle", snapshots.training().snapshot()["segments"])
    found = read_snapshot(path)
    assert len(found.segments) == 2
    assert found.histories == ()


def test_blocks_of_older_writers_have_no_address_and_a_history(tmp_path):
    segments = snapshots.training().snapshot()["segments"]
    addresses = [block["address"] for each in segments for block in each["blocks"]]
    for block in (block for each in segments for block in each["blocks"]):
        frames = block.pop("frames")
        del block["address"], block["requested_size"]
        block["history"] = [{"addr": 0, "frames": frames, "real_size": block["size"]}]
    found = read_snapshot(snapshots.write(tmp_path / "s.pickle", segments))
    assert found.blocks.address.tolist() == addresses
    assert found.blocks.requested_bytes.tolist() == found.blocks.size_bytes.tolist()
    assert found.stacks


# What is refused, and that nothing of it ran.


class _Gadget:
    def __reduce__(self):
        return os.system, ("touch /tmp/stepscope-was-here",)


class _Stateful:
    def __setstate__(self, state):
        raise AssertionError("it ran")


def _global(text: bytes) -> bytes:
    return b"\x80\x02c" + text + b"\nq\x00."


HOSTILE = {
    "os.system by name": b"cos\nsystem\n(S'touch /tmp/stepscope-was-here'\ntR.",
    "os.system, protocol 4": pickle.dumps({"segments": [_Gadget()]}, 4),
    "os.system, protocol 2": pickle.dumps({"segments": [_Gadget()]}, 2),
    "a class of ours": pickle.dumps([_Stateful()], 4),
    "eval": _global(b"builtins\neval"),
    "a numpy array": pickle.dumps(np.zeros(3), 4),
    "a set": pickle.dumps({1, 2}, 4),
    "a bytearray": pickle.dumps(bytearray(b"abc"), 5),
    "INST": b"\x80\x02(S'x'\nios\nsystem\n.",
    "OBJ": b"\x80\x02(cos\nsystem\nS'x'\no.",
    "BUILD on a dict": b"\x80\x02}}b.",
    "REDUCE on a string": b"\x80\x02X\x01\x00\x00\x00a)R.",
    "an extension code": b"\x80\x02\x82\x01.",
    "a long extension code": b"\x80\x02\x84\x01\x00\x00\x00.",
    "a persistent id": b"\x80\x02Pthis\n.",
    "a binary persistent id": b"\x80\x02NQ.",
    "an out-of-band buffer": b"\x80\x05\x97.",
    "an opcode nobody knows": b"\x80\x02\xff.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_asks_for_more_than_plain_data_is_refused(name, tmp_path, monkeypatch):
    ran: list[object] = []
    monkeypatch.setattr(os, "system", ran.append)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(HOSTILE[name])
    assert is_snapshot(path)
    with pytest.raises(UnreadableInputError, match=r"not plain data.*Nothing of it was run"):
        read_snapshot(path)
    assert ran == []


def test_a_registered_extension_is_never_looked_up(tmp_path):
    copyreg.add_extension("os", "system", 77)
    try:
        pickle.loads(b"\x80\x02\x82\x4d.")  # now the class is in copyreg's cache
        with pytest.raises(UnreadableInputError, match="EXT1"):
            load_plain(b"\x80\x02\x82\x4d.", "x")
    finally:
        copyreg.remove_extension("os", "system", 77)


def test_the_refusal_names_what_the_pickle_asks_for():
    with pytest.raises(UnreadableInputError, match=r"it asks for os\.system \(byte 0\)"):
        load_plain(HOSTILE["os.system by name"], "x")


def test_the_unpickler_after_the_scan_refuses_as_well():
    """If the scan ever let something through."""
    for text in (HOSTILE["eval"], HOSTILE["a persistent id"]):
        with pytest.raises(pickle.UnpicklingError):
            plain_pickle._Plain(io.BytesIO(text)).load()


@given(data=st.binary(max_size=200))
def test_no_bytes_at_all_do_anything_but_load_or_be_refused(data):
    try:
        value, _ = load_plain(b"\x80\x04" + data, "x")
    except UnreadableInputError:
        return
    assert type(value) in PLAIN_TYPES


@given(st.data())
def test_a_snapshot_cut_or_changed_anywhere_is_read_or_refused(data):
    whole = bytearray(pickle.dumps(snapshots.training().snapshot(), 4))
    place = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        del whole[place:]
    else:
        whole[place] = data.draw(st.integers(0, 255))
    try:
        value, _ = load_plain(bytes(whole), "x")
    except UnreadableInputError:
        return
    assert type(value) in PLAIN_TYPES


def _argument(opcode):
    if opcode.arg is None:
        return b""
    return b"0\n" if opcode.arg.n == pickletools.UP_TO_NEWLINE else b"\x00" * 8


def test_every_opcode_is_either_plain_or_refused():
    """Of all opcodes that Python knows, those that carry no code are the ones let through."""
    plain = {
        "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "STRING", "BINSTRING",
        "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "NONE", "NEWTRUE",
        "NEWFALSE", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "FLOAT",
        "BINFLOAT", "EMPTY_LIST", "APPEND", "APPENDS", "LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1",
        "TUPLE2", "TUPLE3", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "POP", "DUP", "MARK",
        "POP_MARK", "GET", "BINGET", "LONG_BINGET", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE",
        "PROTO", "STOP", "FRAME",
    }  # fmt: skip
    for opcode in pickletools.opcodes:
        code = opcode.code.encode("latin1")
        try:
            plain_pickle._scan(code + _argument(opcode) + b".", "x")
            refused = False
        except UnreadableInputError as error:
            refused = "not plain data" in str(error) and "byte 0" in str(error)
        assert refused == (opcode.name not in plain), opcode.name


@pytest.mark.parametrize(
    ("why", "data"),
    [
        ("ends early", b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"abc."),
        ("ends early", b"\x80\x02X" + struct.pack("<I", 0xFFFFFFF0) + b"abc."),
        ("memo index 2,147,483,647", b"\x80\x02}r" + struct.pack("<I", 0x7FFFFFFF) + b"."),
        ("memo index 4,294,967,295", b"\x80\x02}r" + b"\xff" * 4 + b"."),
        ("memo index 99,999,999,999", b"(dp99999999999\n."),
        ("more than 64 bits", b"\x80\x02\x8b" + struct.pack("<I", 1000) + b"\x01" * 1000 + b"."),
        ("thousands of digits", b"\x80\x02L" + b"9" * 5000 + b"L\n."),
        ("damaged", b"\x80\x02h\x07."),
        ("damaged", b"\x80\x02a."),
        ("damaged", b"\x80\x02I12x\n."),
        ("damaged", b"\x80\x02}]Ns."),  # a list as a key
        ("damaged", b"\x80\x09N."),
    ],
)
def test_lengths_and_indices_that_do_not_fit_the_file_are_refused(why, data):
    with pytest.raises(UnreadableInputError, match=why):
        load_plain(data, "x")


def test_deep_nesting_does_not_overflow_anything():
    depth = 300_000
    value, _ = load_plain(b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".", "x")
    assert isinstance(value, list)
    del value
    with pytest.raises(UnreadableInputError, match="not a memory snapshot"):
        _read_bytes(b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".")


def _read_bytes(data):
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "s.pickle"
        path.write_bytes(data)
        return read_snapshot(path)


def test_a_part_repeated_without_end_is_refused_at_once():
    """Nine lists of ten times the one before: a thousand million blocks in a few bytes."""
    block = {"size": 512, "address": 0, "state": "inactive", "requested_size": 0, "frames": []}
    blocks = [block] * 1000
    segment = {"device": 0, "address": 0, "total_size": 512, "blocks": blocks}
    with pytest.raises(UnreadableInputError, match="again and again"):
        _read_bytes(pickle.dumps({"segments": [segment] * 1000}, 4))
    event = {"action": "alloc", "addr": 0, "size": 1, "frames": []}
    with pytest.raises(UnreadableInputError, match="again and again"):
        _read_bytes(pickle.dumps({"segments": [], "device_traces": [[event] * 100] * 100}, 4))


def test_frames_that_are_shared_are_read_once():
    frames = [snapshots.frame("a.py", 1, "f")] * 50
    event = {"action": "alloc", "addr": 0, "size": 1, "frames": frames}
    content = {"segments": [], "device_traces": [[dict(event) for _ in range(20)]]}
    found = _read_bytes(pickle.dumps(content, 4))
    assert len(found.stacks) == 1


def test_more_containers_than_anybody_needs_are_refused(monkeypatch):
    monkeypatch.setattr(plain_pickle, "MAX_CONTAINERS", 100)
    with pytest.raises(UnreadableInputError, match="more than 100 dicts and lists"):
        load_plain(pickle.dumps([[] for _ in range(101)], 4), "x")


@pytest.mark.parametrize(
    "content",
    [
        {},
        [1, 2],
        "segments",
        {"segments": 3},
        {"segments": [1]},
        {"segments": [{"address": 1}]},
        {"segments": [{"address": "1", "total_size": 3}]},
        {"segments": [{"address": 1.5, "total_size": 3}]},
        {"segments": [{"address": 2**70 // 3, "total_size": 3}]},
        {"segments": [], "device_traces": {"a": 1}},
        {"segments": [], "device_traces": [[{"action": "alloc", "size": "x"}]]},
    ],
)
def test_a_pickle_of_another_shape_is_not_a_snapshot(content):
    with pytest.raises(UnreadableInputError, match="not a memory snapshot"):
        _read_bytes(pickle.dumps(content, 4))


def test_actions_of_later_versions_are_listed_as_unknown():
    event = {"action": "defragment", "addr": 0, "size": 1, "frames": None}
    found = _read_bytes(pickle.dumps({"segments": [], "device_traces": [[event]]}, 4))
    assert found.unknown_actions == ("defragment",)
    assert found.histories[0].action.tolist() == [ACTIONS.index("unknown")]


def _changed(change):
    content = snapshots.training().snapshot()
    change(content["segments"], content["device_traces"][0])
    return content


ODD = {
    "total_size": lambda segments, _: segments[1].update(total_size=-1),
    "address": lambda segments, _: segments[1].update(address=2**70),
    "device": lambda segments, _: segments[1].update(device=10**9),
    "segments (not a dict)": lambda segments, _: segments.append([segments]),
    "segments that overlap": lambda segments, _: segments.append(dict(segments[0])),
    "blocks larger than their segment": lambda segments, _: segments[1].update(total_size=512),
    "size": lambda segments, _: segments[0]["blocks"][0].update(size="large"),
    "state": lambda segments, _: segments[0]["blocks"][0].update(state=["active"]),
    "requested_size": lambda segments, _: segments[0]["blocks"][0].update(requested_size=1e9),
    "frames (not a list)": lambda segments, _: segments[0]["blocks"][0].update(frames=7),
    "frames (not a dict)": lambda _, events: events[1].update(frames=[3]),
    "filename": lambda _, events: events[1].update(frames=[{"line": 1, "name": "f"}]),
    "line": lambda _, events: events[1].update(frames=[snapshots.frame("a.py", 2**40, "f")]),
    "name (cut or repaired)": lambda _, events: events[1].update(
        frames=[snapshots.frame("a.py", 1, "\ud800" * 5000)]
    ),
    "addr": lambda _, events: events[1].update(addr=-3),
    "time_us": lambda _, events: events[1].update(time_us=10**18),
    "action": lambda _, events: events[1].update(action=None),
}


@pytest.mark.parametrize("what", ODD)
def test_what_cannot_be_meant_is_counted_with_an_example_and_not_used(what):
    found = _read_bytes(pickle.dumps(_changed(ODD[what]), 4))
    notes = [note for note in found.quality if note.detail.startswith(f"{what}: 1 value ")]
    assert [(note.id, note.count) for note in notes] == [("odd-values", 1)]
    assert len(found.quality) == 1
    assert len(notes[0].detail) < 200
    assert (found.segments.total_bytes >= 0).all()
    assert (found.blocks.size_bytes >= 0).all()
    filled = np.bincount(found.blocks.segment, found.blocks.size_bytes)
    assert (filled <= found.segments.total_bytes).all()
    assert (found.histories[0].size_bytes >= 0).all()
    for stack in found.stacks:
        for file, line, name in stack:
            assert f"{file}{name}".encode()
            assert 0 <= line < 2**31


def test_a_whole_snapshot_has_nothing_odd():
    assert _read_bytes(pickle.dumps(snapshots.training().snapshot(), 4)).quality == ()


def test_sizes_that_add_up_to_more_than_any_machine_has_are_refused():
    event = {"action": "alloc", "addr": 0, "size": 1 << 44, "frames": []}
    events = [dict(event) for _ in range(1 << 17)]
    with pytest.raises(UnreadableInputError, match="more bytes than any machine has"):
        _read_bytes(pickle.dumps({"segments": [], "device_traces": [events]}, 4))


def test_a_tuple_that_takes_for_ever_to_hash_is_refused():
    """Forty pairs of the pair before; a hundred thousand levels; a wide one again and again."""
    for tuples in (b"2\x86" * 40, b"\x85" * 100_000, b"(" + b"2" * 600 + b"t(222t"):
        with pytest.raises(UnreadableInputError, match="holds more than 1,000 parts"):
            load_plain(b"\x80\x02}K\x00" + tuples + b"Ns.", "x")
    nested = {"pools": [(0, (1, (2, "three"))) for _ in range(1000)], (1, (2, 3)): (4, 5, 6)}
    for protocol in range(6):
        assert load_plain(pickle.dumps(nested, protocol), "x")[0] == nested


def test_more_containers_than_the_length_can_fill_are_refused():
    with pytest.raises(UnreadableInputError, match="dicts and lists"):
        load_plain(b"\x80\x02]" + b"]a" * 2_000_000 + b".", "x")


@pytest.mark.parametrize(
    "head",
    [b'{"traceEvents"', b"[\n{", b"\x1f\x8b\x08", b"SQLite format 3\x00", b"PK\x03\x04", b""],
)
def test_other_files_are_not_taken_for_pickles(head):
    assert not is_pickle(head)


def test_a_snapshot_is_not_a_trace_and_is_found_in_a_folder(tmp_path):
    path = snapshots.write(tmp_path / "oom.pickle", snapshots.training().snapshot())
    (tmp_path / "notes.pickle").write_text("hello")
    with pytest.raises(UnreadableInputError, match="is a pickle, not a trace"):
        read_trace(path)
    assert find_traces(tmp_path) == [path]
