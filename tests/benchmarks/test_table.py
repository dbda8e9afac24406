from dataclasses import replace

import pytest

import table
from measurement import Measurement, ratios, speed, summary

ROW = Measurement(
    name="mi300x_resnet_checkpoint_rank0of8",
    events=56451,
    whole_s=0.25,
    load_s=0.1,
    explain_s=0.02,
    peak_bytes=52_000_000,
    second_load_s=0.0025,
    text_bytes=17_000_000,
    cached=True,
    peer_whole_s=2.0,
    peer_load_s=1.0,
    peer_explain_s=0.2,
    peer_peak_bytes=104_000_000,
)
FAILED = replace(
    ROW,
    peer_whole_s=None,
    peer_load_s=None,
    peer_explain_s=None,
    peer_peak_bytes=None,
    peer_failure="AssertionError",
)


def test_speed_is_all_text_over_all_time():
    slower = replace(ROW, load_s=0.3)
    assert speed([ROW, slower]) == "Reading: 85 MB/s, 0.28 million events/s"


def test_ratios_are_of_the_peers_over_ours():
    found = (ROW.whole_ratio, ROW.in_process_ratio, ROW.peak_ratio, ROW.cached_ratio)
    assert found == pytest.approx((8, 10, 0.5, 40))


def test_traces_the_peer_cannot_read_are_in_no_mean():
    assert ratios([ROW, FAILED], lambda row: row.cached_ratio) == [40]
    assert all(result.met for result in summary([ROW, FAILED]))


def test_small_files_are_not_cached_and_in_no_mean():
    assert ratios([replace(ROW, cached=False)], lambda row: row.cached_ratio) == []


def test_without_a_peer_only_the_cache_has_a_mean():
    alone = replace(FAILED, peer_failure=None)
    assert [result.target.name for result in summary([alone])] == [
        "second open from the cache, times faster"
    ]


def test_no_line_is_wider_than_the_page():
    big = replace(ROW, whole_s=123.4, peer_whole_s=1234.5, peak_bytes=1_200_000_000)
    for row in (ROW, FAILED, big):
        assert len(table.line(row)) <= table.WIDTH
    assert max(map(len, table.HEAD.splitlines())) <= table.WIDTH
