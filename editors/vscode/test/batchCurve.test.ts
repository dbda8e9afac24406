// From a batch to what it gives, and back.

import assert from "node:assert/strict";
import { test } from "node:test";

import { batchAfterKey, batchFor, canChoose, fullScale, offeredBatches, predictAt, stepAt } from "../src/model/batchCurve";
import { panel, point } from "./panels";

const points = panel().batch?.points ?? [];
const offered = offeredBatches(points, 32);

test("steps between batches are powers of two, a sixteenth of an octave", () => {
  assert.deepEqual([1, 15, 16, 31, 32, 63, 64, 100, 256].map(stepAt), [1, 1, 1, 1, 2, 2, 4, 4, 16]);
});

test("offered batches lie within the prediction and include the one in the code", () => {
  assert.equal(offered[0], 8);
  assert.equal(offered.at(-1), 128);
  assert.ok([31, 32, 34, 64, 68].every((batch) => offered.includes(batch)));
  assert.ok(![33, 66].some((batch) => offered.includes(batch)));
  assert.ok(offeredBatches(points, 33).includes(33));
  assert.ok(!offeredBatches(points, 4_096).includes(4_096));
  assert.deepEqual(offeredBatches([], 32), []);
});

test("a million batches are offered as a few hundred", () => {
  const wide = panel({ batch: { value: 1, line: 0, points: [point(1), point(1 << 20)] } }).batch?.points ?? [];
  assert.ok(offeredBatches(wide, 1).length < 400);
});

test("between points the step grows along a straight line, with its interval", () => {
  const middle = predictAt(points, 48);
  assert.equal(middle?.stepMs.value, 58);
  assert.ok(Math.abs((middle?.stepMs.high ?? 0) - 63.8) < 1e-9);
  assert.ok(Math.abs((middle?.samplesPerSecond?.value ?? 0) - 48_000 / 58) < 1e-9);
  assert.ok(Math.abs((middle?.samplesPerSecond?.low ?? 0) - 48_000 / 63.8) < 1e-9);
  assert.equal(middle?.peakBytes?.value, 5.8e8);
});

test("several ranks make more samples of a step than the batch in the code", () => {
  const ranks = panel({ batch: { value: 8, line: 0, points: [8, 16].map((batch) => ({ ...point(batch), samplesPerSecond: (4_000 * batch) / (10 + batch) })) } });
  assert.ok(Math.abs((predictAt(ranks.batch?.points ?? [], 12)?.samplesPerSecond?.value ?? 0) - 48_000 / 22) < 1e-9);
});

test("nothing is predicted beyond the points", () => {
  assert.equal(predictAt(points, 4), null);
  assert.equal(predictAt(points, 256), null);
  assert.equal(predictAt([], 32), null);
});

test("throughput asks for the smallest batch that is as fast", () => {
  for (const batch of offered) {
    const wanted = predictAt(points, batch)?.samplesPerSecond?.value ?? 0;
    assert.equal(batchFor(points, offered, "samplesPerSecond", wanted), batch);
  }
  assert.equal(batchFor(points, offered, "samplesPerSecond", 0), 8);
  assert.equal(batchFor(points, offered, "samplesPerSecond", 1e9), 128);
});

test("where more batch makes it slower, the fastest is the end of the bar", () => {
  const slower = panel({ batch: { value: 8, line: 0, points: [{ ...point(8), samplesPerSecond: 500 }, { ...point(16), samplesPerSecond: 900 }, { ...point(32), stepMs: 64, samplesPerSecond: 500 }] } });
  const curve = slower.batch?.points ?? [];
  assert.equal(batchFor(curve, [8, 16, 32], "samplesPerSecond", 5_000), 16);
});

test("memory asks for the largest batch that takes no more", () => {
  assert.equal(batchFor(points, offered, "peakBytes", 1e8 + 64.5e7), 64);
  assert.equal(batchFor(points, offered, "peakBytes", 1), 8);
  assert.equal(batchFor(points, offered, "peakBytes", 1e12), 128);
});

test("memory that was not captured cannot be dragged", () => {
  const unknown = panel({ batch: { value: 8, line: 0, points: [8, 16].map((batch) => ({ ...point(batch), peakBytes: null, peakLowBytes: null, peakHighBytes: null })) } });
  const curve = unknown.batch?.points ?? [];
  assert.equal(batchFor(curve, [8, 16], "peakBytes", 1e9), null);
  assert.equal(fullScale(curve, [8, 16], "peakBytes", 1e9), null);
});

test("the memory bar ends at the device's memory only when that is near", () => {
  const most = 1.1 * (1e8 + 128e7);
  assert.equal(fullScale(points, offered, "peakBytes", 1.2 * most), 1.2 * most);
  assert.equal(fullScale(points, offered, "peakBytes", 100 * most), most);
  assert.equal(fullScale(points, offered, "peakBytes", null), most);
});

test("a wide interval does not squeeze the bar", () => {
  const wide = panel({ batch: { value: 8, line: 0, points: [8, 16].map((batch) => ({ ...point(batch), peakHighBytes: 9e9 })) } }).batch?.points ?? [];
  assert.equal(fullScale(wide, [8, 16], "peakBytes", null), 1.3 * 2.6e8);
});

test("what is the same for every batch cannot be chosen by", () => {
  assert.ok(canChoose(points, offered, "peakBytes"));
  const same = panel({ batch: { value: 8, line: 0, points: [8, 16].map((batch) => ({ ...point(batch), peakBytes: 5e8 })) } }).batch?.points ?? [];
  assert.ok(!canChoose(same, [8, 16], "peakBytes"));
  assert.ok(canChoose(same, [8, 16], "samplesPerSecond"));
  assert.ok(!canChoose(points, [8], "samplesPerSecond"));
});

test("keys of a slider", () => {
  const after = (key: string, batch = 32): number | null => batchAfterKey(key, batch, offered);
  assert.deepEqual(["ArrowRight", "ArrowUp", "ArrowLeft", "ArrowDown"].map((key) => after(key)), [34, 34, 31, 31]);
  assert.deepEqual(["PageUp", "PageDown", "Home", "End"].map((key) => after(key)), [64, 16, 8, 128]);
  assert.deepEqual([after("ArrowRight", 128), after("ArrowLeft", 8), after("PageUp", 100), after("PageDown", 10)], [128, 8, 128, 8]);
  assert.equal(after("a"), null);
});
