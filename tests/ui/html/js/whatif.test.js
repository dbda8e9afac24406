// The arithmetic of "What if", on steps that can be worked out by hand.

import "./page.js";

import assert from "node:assert/strict";
import { test } from "node:test";

import { adjustedStep, chainSums, replay, ScaledStep, transferCost } from "../../../../src/stepscope/ui/html/page/scaled_step.js";
import { bottleneck, verdict } from "../../../../src/stepscope/ui/html/page/whatif_words.js";

/** @param {Partial<Predicted>} parts @returns {Predicted} */
const predicted = (parts) => ({
  step: 10, low: 9, high: 11, stalls: 0, host: 4, device: 9.9, factor: 1, comm: 0, exposed: 0, efficiency: 1,
  peak: null, peak_low: null, peak_high: null, ...parts,
});

test("a message costs its latency and its bytes, by the line for its size", () => {
  /** @type {[number, number, number][]} */
  const lines = [[100, 5, 1], [1000, 50, 0.5]];
  assert.equal(transferCost(lines, 100, 1), 105);
  assert.equal(transferCost(lines, 200, 2), 100);
  assert.equal(transferCost(lines, 4000, 1), 2050);
});

test("sums that share processors with compute last longer while it runs, and cost it time", () => {
  const [lasting, lost] = chainSums([0, 100], 1000, [10, 10], [30, 30], 0.5);
  assert.deepEqual(lasting, [30, 30]);
  assert.deepEqual(lost, [5, 5]);
  const [alone, free] = chainSums([50], 0, [10], [30], 0.5);
  assert.deepEqual(alone, [10]);
  assert.deepEqual(free, [0]);
});

test("a replay takes the latest of what each time waits for", () => {
  // The device starts 3 after the host's call; the host goes on after 5, the device needs 10.
  const table = Float64Array.of(5, -Infinity, 13, 10);
  assert.deepEqual(replay({ times: 2, stretches: [table] }, () => {}), [13, 23, 33, 43]);
});

/** One stretch before the gradients are ready (100 ns on the host), one after (20 ns); one bucket. */
function makeScaling(stalls = /** @type {any[]} */ ([])) {
  const link = { spread: 0, basis: "", broadcast: [], beside: [], lost: 0, said: [], straggling: 1 };
  return new ScaledStep({
    unit: 1, before: 1, onHost: true, finish: 0, sent: [], send: 0, afterSend: 0, moments: 2, forward: -1,
    links: [{ ...link, ranks: 1, all_reduce: [] }, { ...link, ranks: 2, all_reduce: [[1e9, 10, 1]] }],
    buckets: [{ bucket_mb: null, size_bytes: [30], carried_bytes: [], marks: [0], host_ns: [2], fill_ns: [0] }],
    doubts: { change: 0, least: 0, model: 0, straggling: 0, host: 0, share: 0, low_end: 1, reached: 0 },
    adjusted: {}, narrowest: 0.01, held: 0, batch: ["", ""],
    shapes: { planned: { times: 1, stretches: 2, sloped: false } },
    steps: [{ compute: 1, task: null, waiting: 0, wait: [], share: [], silent: 0, quiet: null, planned: { host: 120, busy: [], own: [1], marked: [] } }],
    cells: [{ ns: 120, variance: 0, spread: 0, step: 0, shared: [0, null], peaks: [null, null], stalls }],
    columns: { "planned-tables-0-0": Uint8Array.of(101, 21) },
  });
}

test("stalls come on top of the step, with their doubt", () => {
  const scaling = makeScaling([[[30, 0], [30, 0]], [[80, 20], [40, 0]]]);
  const alone = scaling.predict(0, 0, { link: 0, buckets: 0, bandwidth: 1, strong: false });
  assert.deepEqual([alone.step, alone.stalls, alone.low, alone.high], [150, 30, 150, 150]);
  const without = makeScaling().predict(0, 0, { link: 1, buckets: 0, bandwidth: 1, strong: false });
  const two = scaling.predict(0, 0, { link: 1, buckets: 0, bandwidth: 1, strong: false });
  assert.equal(two.step, without.step + 80);
  assert.ok(Math.abs(Math.log(two.high / two.step) - (1.96 * 20) / two.step) < 1e-12);
});

test("one worker's step is its own work", () => {
  const scaling = makeScaling();
  const alone = scaling.predict(0, 0, { link: 0, buckets: 0, bandwidth: 1, strong: false });
  assert.deepEqual([alone.step, alone.comm, alone.exposed], [120, 0, 0]);
});

test("with two workers what the last compute does not hide of the sum is exposed", () => {
  const scaling = makeScaling();
  // Ready at 102, done at 142; compute ends at 122: 20 are exposed. Twice the bandwidth: 127.
  const two = scaling.predict(0, 0, { link: 1, buckets: 0, bandwidth: 1, strong: false });
  assert.deepEqual([two.step, two.comm, two.exposed], [142, 40, 20]);
  const faster = scaling.predict(0, 0, { link: 1, buckets: 0, bandwidth: 2, strong: false });
  assert.deepEqual([faster.step, faster.comm], [127, 25]);
  assert.equal(scaling.stepOf(0, { link: 1, buckets: 0, bandwidth: 1, strong: true }), null);
});

test("earlier predictions shift the step and stretch its interval", () => {
  const plain = adjustedStep({ step: 100e6, low: 80e6, high: 125e6 }, [0, 0], 0.01);
  assert.ok(Math.abs(plain.low - 80) < 1e-9 && Math.abs(plain.high - 125) < 1e-9);
  const taught = adjustedStep({ step: 100e6, low: 100e6, high: 125e6 }, [Math.log(1.1), 2], 0.01);
  assert.ok(Math.abs(taught.step - 110) < 1e-9);
  assert.ok(Math.abs(taught.low - 110 * Math.exp(-0.02)) < 1e-9);
  assert.ok(Math.abs(taught.high - 110 * 1.25 ** 2) < 1e-9);
});

test("the verdict says faster, shorter, longer or no difference", () => {
  const now = predicted({});
  assert.equal(verdict(now, predicted({ step: 9.9, factor: 10 / 9.9 }), 0.02), "No real difference (under 2%): now 10.0 ms");
  assert.equal(verdict(now, predicted({ step: 5, factor: 2 }), 0.02), "2.0 times faster: now 10.0 ms");
  assert.equal(verdict(now, predicted({ step: 8, factor: 1.25 }), 0.02), "20% shorter: now 10.0 ms");
  assert.equal(verdict(now, predicted({ step: 12, factor: 10 / 12 }), 0.02), "20% longer: now 10.0 ms");
  assert.equal(verdict(now, predicted({ step: 12, factor: 20 / 12 }), 0.02), "1.7 times as many samples a second, 2 times the samples a step; now 10.0 ms");
});

test("the bottleneck is who needs most of the step alone", () => {
  assert.equal(bottleneck(predicted({}), false, 0.92)[0], "the device");
  assert.equal(bottleneck(predicted({ device: 5, host: 9.5 }), false, 0.92)[0], "the host");
  assert.equal(bottleneck(predicted({ device: 5, host: 5 }), false, 0.92)[0], "neither alone");
  assert.equal(bottleneck(predicted({ exposed: 2 }), false, 0.92)[0], "the links");
});
