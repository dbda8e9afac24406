// The flame graph of stalled steps: shades, words and neighbours.

import "./page.js";

import assert from "node:assert/strict";
import { test } from "node:test";

import { DIFFS } from "../../../../src/stepscope/ui/html/page/palette.js";
import { DifferenceTree, moreWords, nodeWords } from "../../../../src/stepscope/ui/html/page/stall_flames.js";

const MS = 1e6;
const STRINGS = ["a stalled step", "/home/u/train.py(10): main", "/home/u/train.py(41): log_images", "torch/nn/linear.py(134): forward", "torch/optim/adam.py(9): step"];

/** A step of 200 ms: 150 in log_images (2 in a typical one), 40 in forward (40), 8 in the optimizer (23). */
function makeTree() {
  return new DifferenceTree({
    logging_parent: Uint8Array.of(0, 1, 2, 2, 2),
    logging_name: Uint8Array.of(0, 1, 2, 3, 4),
    logging_kind: Uint8Array.of(0, 1, 1, 0, 0),
    logging_count: Uint8Array.of(100, 99, 75, 20, 4),
    logging_total: Uint32Array.of(200 * MS, 198 * MS, 150 * MS, 40 * MS, 8 * MS),
    logging_self: Uint32Array.of(2 * MS, 0, 150 * MS, 40 * MS, 8 * MS),
    logging_typical: Uint32Array.of(65 * MS, 65 * MS, 2 * MS, 40 * MS, 23 * MS),
  }, "logging", STRINGS);
}

test("the largest difference has the fullest colour", () => {
  const tree = makeTree();
  assert.equal(tree.most, 148 * MS);
  assert.equal(tree.shade(2), 2 * DIFFS);
  assert.equal(tree.shade(3), DIFFS);
  assert.equal(tree.shade(4), DIFFS - Math.round((DIFFS * 15) / 148));
});

test("what is more, less and the same is said in words", () => {
  const tree = makeTree();
  assert.equal(moreWords(tree, 2), "148 ms more than in a typical step");
  assert.equal(moreWords(tree, 3), "as long as in a typical step");
  assert.equal(moreWords(tree, 4), "15.0 ms less than in a typical step");
});

test("the user's own lines begin with their place", () => {
  const tree = makeTree();
  assert.equal(nodeWords(tree, 2), "train.py:41 log_images  +148 ms");
  assert.equal(nodeWords(tree, 3), "forward  linear.py:134");
  assert.equal(nodeWords(tree, 0), "a stalled step");
});

test("neighbours are in the order of their widths", () => {
  const tree = makeTree();
  assert.equal(tree.neighbour(2, 1), 3);
  assert.equal(tree.neighbour(3, -1), 2);
  assert.equal(tree.neighbour(4, 1), -1);
  assert.equal(tree.neighbour(2, -1), -1);
  assert.equal(tree.neighbour(-1, 1), -1);
});
