// What a prediction means, in words.

import "./page.js";

import assert from "node:assert/strict";
import { test } from "node:test";

import { bottleneck, verdict } from "../../../../src/stepscope/ui/html/page/whatif_words.js";

/** @param {Partial<Predicted>} parts @returns {Predicted} */
const predicted = (parts) => ({
  step: 10, low: 9, high: 11, stalls: 0, host: 4, device: 9.9, factor: 1, comm: 0, exposed: 0, efficiency: 1, assumed: [],
  peak: null, peak_low: null, peak_high: null, ...parts,
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
  assert.equal(bottleneck(predicted({}), false, 0.92)[0], "the GPU");
  assert.equal(bottleneck(predicted({ device: 5, host: 9.5 }), false, 0.92)[0], "the CPU");
  assert.equal(bottleneck(predicted({ device: 5, host: 5 }), false, 0.92)[0], "neither alone");
  assert.equal(bottleneck(predicted({ exposed: 2 }), false, 0.92)[0], "the links");
});
