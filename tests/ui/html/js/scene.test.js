// The events of one rank: a thread with nested operators, a stream with what they launched, a gap.

import "./page.js";

import assert from "node:assert/strict";
import { test } from "node:test";

import { FlameTree } from "../../../../src/stepscope/ui/html/page/flame_graph.js";
import { fillBins } from "../../../../src/stepscope/ui/html/page/overview.js";
import { lowerBound, Scene } from "../../../../src/stepscope/ui/html/page/scene.js";

const zigzag = (/** @type {number} */ value) => (value >= 0 ? 2 * value : -2 * value - 1);

/** Rows: stream (two kernels), thread's outer operators, thread's inner ones. */
function makeScene() {
  const starts = [[20, 60], [0, 50], [5, 52]];
  const links = [4, 5, -1, -1, -1, -1]; // kernels were launched by the inner operators
  const picture = {
    span_ns: 100, strings: ["gemm", "aten::mm", "aten::add"], left_out: "",
    steps: [/** @type {[string, number, number]} */ (["ProfilerStep#1", 0, 100])],
    lanes: [
      { name: "Stream 7", group: /** @type {"device"} */ ("device"), work: true, folded: false, first_row: 0, rows: 1, events: 2 },
      { name: "Main", group: /** @type {"host"} */ ("host"), work: false, folded: false, first_row: 1, rows: 2, events: 4 },
    ],
    flames_left_out: /** @type {[number, number]} */ ([0, 0]),
  };
  const deltas = starts.flatMap(([first, second]) => [first, second - first]);
  return new Scene(picture, {
    row_start: Uint32Array.of(0, 2, 4, 6),
    start_delta: Uint32Array.from(deltas, zigzag),
    dur: Uint32Array.of(10, 30, 40, 45, 10, 20),
    name: Uint8Array.of(0, 0, 1, 2, 1, 2),
    kind: Uint8Array.of(0, 0, 2, 2, 2, 2),
    link: Uint32Array.from(links, (link, i) => zigzag(link - (i ? links[i - 1] : -1))),
    gap_start: Uint32Array.of(30), gap_dur: Uint32Array.of(30), gap_cause: Uint8Array.of(0), gap_frame: Uint8Array.of(2),
  });
}

test("the lower bound is the first place that is not below", () => {
  assert.equal(lowerBound([1, 3, 3, 7], 3, 0, 4), 1);
  assert.equal(lowerBound([1, 3, 3, 7], 8, 0, 4), 4);
});

test("times, links and the idle lane come out of the columns", () => {
  const scene = makeScene();
  assert.deepEqual([...scene.start], [20, 60, 0, 50, 5, 52, 30]);
  assert.deepEqual([...scene.link], [4, 5, -1, -1, -1, -1, -1]);
  assert.equal(scene.lanes[0].name, "Idle, by cause");
  assert.equal(scene.label(6), "Data loading");
  assert.equal(scene.rowOf(6), 3);
  assert.equal(scene.laneOf(4).name, "Main");
});

test("the event under a moment is found, or the nearest within the slack", () => {
  const scene = makeScene();
  assert.equal(scene.at(0, 25, 0), 0);
  assert.equal(scene.at(0, 45, 20), 0);
  assert.equal(scene.at(0, 45, 5), -1);
});

test("callers and launches follow the stack", () => {
  const scene = makeScene();
  assert.deepEqual(scene.callers(4), [2]);
  assert.deepEqual(scene.launchedBy(3), [1]);
  assert.deepEqual(scene.launchedBy(2), [0]);
  assert.deepEqual(scene.launchedBy(0), []);
});

test("a search counts time that lanes cover once", () => {
  const scene = makeScene();
  const { events, busy } = scene.find("ADD");
  assert.deepEqual(events, [3, 5]);
  assert.deepEqual(busy, { device: 0, host: 45 });
  assert.deepEqual(scene.find("gemm").busy, { device: 40, host: 0 });
  scene.lanes.forEach((lane) => { if (lane.name === "Stream 7") lane.work = false; }); // as annotations
  assert.deepEqual(scene.find("gemm").busy, { device: 0, host: 0 });
  assert.equal(scene.find("gemm").events.length, 2);
});

test("bins of the overview hold each class's share of their time", () => {
  const bins = fillBins(makeScene(), 10);
  assert.equal(bins[2][0], 1); // the first kernel
  assert.equal(bins[4][3], 1); // the gap: causes come after the classes
  assert.equal(bins[9][0], 0);
});

test("a flame tree places children under their parents, the widest first", () => {
  const tree = new FlameTree({
    host_parent: Uint8Array.of(0, 1, 1), host_name: Uint8Array.of(0, 1, 2), host_kind: Uint8Array.of(2, 2, 2),
    host_count: Uint8Array.of(1, 1, 1), host_total: Uint8Array.of(100, 30, 60), host_self: Uint8Array.of(10, 30, 60),
  }, "host", ["main", "short", "long"]);
  assert.deepEqual([...tree.x], [0, 60, 0]);
  assert.equal(tree.whole, 100);
  assert.equal(tree.timeOf(tree.find("main")), 100);
  assert.equal(tree.timeOf(tree.find("o")), 90);
});
