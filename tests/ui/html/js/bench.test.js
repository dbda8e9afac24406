// The order of a bench's workloads, and which of them are shown.

import "./page.js";

import assert from "node:assert/strict";
import { test } from "node:test";

import { matchingKeys, orderRows } from "../../../../src/stepscope/ui/html/page/bench_order.js";

const ROWS = [
  { key: "0", words: "GPT2 bf16", values: [3, null] },
  { key: "1", words: "resnet50", values: [1, 0.5] },
  { key: "2", words: "gpt2", values: [3, -0.5] },
];

test("rows are sorted by a column, those without a value last either way", () => {
  assert.deepEqual(orderRows(ROWS, -1, true), [0, 1, 2]);
  assert.deepEqual(orderRows(ROWS, 0, true), [0, 2, 1]);
  assert.deepEqual(orderRows(ROWS, 0, false), [1, 0, 2]);
  assert.deepEqual(orderRows(ROWS, 1, true), [1, 2, 0]);
  assert.deepEqual(orderRows(ROWS, 1, false), [2, 1, 0]);
});

test("a filter finds every word in any case and order", () => {
  assert.deepEqual([...matchingKeys(ROWS, "")], ["0", "1", "2"]);
  assert.deepEqual([...matchingKeys(ROWS, "gpt")], ["0", "2"]);
  assert.deepEqual([...matchingKeys(ROWS, "BF16 gpt2")], ["0"]);
  assert.deepEqual([...matchingKeys(ROWS, "vgg")], []);
});
