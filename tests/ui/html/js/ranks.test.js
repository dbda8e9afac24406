// Ranks by steps, and tables: what is worked out before anything is drawn.

import "./page.js";

import assert from "node:assert/strict";
import { test } from "node:test";

import { heatScale, heatValues, medians } from "../../../../src/stepscope/ui/html/page/heat_map.js";
import { hostRow, hostValues, placesByHost, rangeWords, rowsByHost } from "../../../../src/stepscope/ui/html/page/host_rows.js";
import { heldAt } from "../../../../src/stepscope/ui/html/page/memory.js";
import { RankScene } from "../../../../src/stepscope/ui/html/page/rank_scene.js";
import { sortedRows } from "../../../../src/stepscope/ui/html/page/table_box.js";

test("zero stands for a step that a rank lacks", () => {
  const values = heatValues({ step: Uint8Array.of(11, 0), comm: Uint8Array.of(4, 0), input: Uint8Array.of(1, 0) });
  assert.deepEqual([...values.own], [7, NaN]);
  assert.deepEqual([...values.input], [0, NaN]);
});

test("medians leave out what is not known", () => {
  const values = Float64Array.of(1, NaN, 3, 5, NaN, NaN, NaN, NaN);
  assert.deepEqual([...medians(values, 2, 4)], [3, NaN]);
});

test("noise stays pale", () => {
  const values = { own: Float64Array.of(100, 101, 99), step: Float64Array.of(100, 101, 99), comm: Float64Array.of(0, 1, 0) };
  assert.deepEqual(heatScale("own", values), { low: 95, high: 114.99999999999999, cut: false, most: 101 });
  assert.deepEqual(heatScale("comm", values), { low: 0, high: 5, cut: false, most: 1 });
});

test("rows are filtered by a word and sorted, absent values last", () => {
  const table = { id: "", title: "", columns: [], sort: 0, absent: "", events: false, rows: [["b", 1], ["a", null], ["ab", [3, 1]]] };
  assert.deepEqual(sortedRows(table, "", 1, true).map(([name]) => name), ["ab", "b", "a"]);
  assert.deepEqual(sortedRows(table, "a", 0, false).map(([name]) => name), ["a", "ab"]);
});

test("memory is what the last event before a moment left", () => {
  const data = { left: 0, right: 1, last: 30, time: [0, 10, 20], allocated: [0, 5e6, 2e6], reserved: [8e6, 8e6, 8e6], categories: /** @type {[string, number[]][]} */ ([["gradients", [0, 5e6, 0]]]) };
  assert.deepEqual(heldAt(data, 15), { title: "5.00 MB after 10 ns", lines: ["gradients 5.00 MB", "reserved 8.00 MB"] });
  assert.equal(heldAt(data, 20).title, "2.00 MB after 20 ns");
});

test("a call waits until the last rank has come, then for its transfer to begin", () => {
  const scene = new RankScene({
    lanes: { ranks: [0, 1], errors: [0, 2], reference: 0, kinds: ["all_reduce"], waiting: [true], span: 100, steps: [[0, 4, 0, 90], [1, 4, 0, 95]] },
    stragglers: [[1, "slow compute"]],
    columns: {
      lane_match: Uint8Array.of(0, 0), lane_place: Uint8Array.of(1, 0), lane_row: Uint8Array.of(0, 0), lane_kind: Uint8Array.of(0, 0),
      lane_size: Uint8Array.of(5, 5), lane_arrival: Uint8Array.of(60, 20), lane_start: Uint8Array.of(65, 65), lane_end: Uint8Array.of(80, 80), last: Uint8Array.of(60),
    },
  });
  assert.deepEqual([...scene.traced], [1, 0]);
  assert.deepEqual(scene.members, [[1, 0]]);
  assert.deepEqual(scene.last, [0]);
  assert.equal(scene.waitEnd(1), 60);
  assert.equal(scene.transferStart(1), 65);
  assert.deepEqual(scene.steps, [["step 4", 0, 90]]);
});

test("ranks lie under their hosts, and a fold shows the hosts alone", () => {
  const byHost = placesByHost([0, 1, 0, 1], 2);
  assert.deepEqual(byHost, [[0, 2], [1, 3]]);
  const open = new Set([1]);
  assert.deepEqual(rowsByHost(byHost, { folded: false, open }), [0, 2, 1, 3]);
  assert.deepEqual(rowsByHost(byHost, { folded: true, open }), [hostRow(0), hostRow(1), 1, 3]);
  assert.deepEqual(rowsByHost(byHost, { folded: true, open: new Set(), worth: [1, 5] }), [hostRow(1), hostRow(0)]);
});

test("ranks whose host is not known are not grouped, nor are those of one host", () => {
  assert.deepEqual(placesByHost([0, -1], 2), []);
  assert.deepEqual(placesByHost([0, 0], 1), []);
});

test("the slowest rank stands for its host: it works longest and waits least", () => {
  const values = Float64Array.of(5, 6, 9, NaN, 1, 1);
  assert.deepEqual([...hostValues("own", values, [[0, 1], [2]], 2)], [9, 6, 1, 1]);
  assert.deepEqual([...hostValues("comm", values, [[0, 1], [2]], 2)], [5, 6, 1, 1]);
});

test("runs of ranks are written short", () => {
  assert.equal(rangeWords([8, 9, 10, 11, 14]), "8-11, 14");
  assert.equal(rangeWords([0, 2, 4, 6, 8, 10, 12]), "0, 2, 4, 6, 8, 10, …");
});

test("a rank that recorded nothing has a lane that was not traced", () => {
  const none = Uint8Array.of();
  const scene = new RankScene({
    lanes: { ranks: [0, 85], errors: [0, 0], reference: 0, kinds: [], waiting: [], span: 10, steps: [[0, 4, 0, 10]] },
    stragglers: [[85, "slow compute"]],
    columns: {
      lane_match: none, lane_place: none, lane_row: none, lane_kind: none,
      lane_size: none, lane_arrival: none, lane_start: none, lane_end: none, last: none,
    },
  });
  assert.deepEqual([scene.traced.has(0), scene.traced.has(1)], [true, false]);
});
