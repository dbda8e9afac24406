// Nested blocks: sums are kept, nothing overlaps, small ones are gathered.

import assert from "node:assert/strict";
import { test } from "node:test";

import type { Block } from "../src/contract";
import { blockAt, depthOf, layoutBlocks, neighbour } from "../src/model/blockLayout";
import { panel } from "./panels";

const block = (name: string, amount: number, ...children: Block[]): Block => ({ name, amount, share: amount / 100, uri: null, line: null, children });
const limits = { lowest: 0.05, columns: 3 };
const { time } = panel();

test("largest first, heights by amount, parts beside their whole", () => {
  const placed = layoutBlocks(time, limits);
  assert.deepEqual(placed.map(({ block: { name }, depth }) => [name, depth]), [
    ["backward", 0], ["forward", 0], ["attention", 1], ["<img src=x onerror=alert(1)>", 1], ["not in your lines", 0],
  ]);
  const [backward, forward, attention] = placed;
  assert.ok(Math.abs((backward?.height ?? 0) - 24 / 42) < 1e-12);
  assert.equal(attention?.top, forward?.top);
  assert.deepEqual(attention?.path, [0, 0]);
  const firstColumn = placed.filter(({ depth }) => depth === 0).reduce((sum, { height }) => sum + height, 0);
  assert.ok(Math.abs(firstColumn - 1) < 1e-12);
});

test("small blocks stand together and lose nothing", () => {
  const placed = layoutBlocks([block("large", 94), block("a", 3), block("b", 2), block("c", 1)], limits);
  assert.deepEqual(placed.map(({ block: { name }, gathered }) => [name, gathered.length]), [["large", 0], ["3 smaller", 3]]);
  assert.equal(placed[1]?.block.amount, 6);
  assert.ok(Math.abs((placed[1]?.block.share ?? 0) - 0.06) < 1e-12);
});

test("a single small block keeps its name", () => {
  assert.deepEqual(layoutBlocks([block("large", 99), block("tiny", 1)], limits).map((one) => one.block.name), ["large", "tiny"]);
});

test("parts that add up to more than their whole stay inside it", () => {
  const placed = layoutBlocks([block("whole", 50, block("a", 40), block("b", 40)), block("rest", 50)], limits);
  const parts = placed.filter(({ depth }) => depth === 1);
  assert.ok(parts.every(({ top, height }) => top + height <= 0.5 + 1e-12));
});

test("columns are limited, and depth is counted", () => {
  const deep = [block("1", 100, block("2", 100, block("3", 100, block("4", 100))))];
  assert.equal(depthOf(deep), 4);
  assert.equal(layoutBlocks(deep, limits).length, 3);
  assert.deepEqual(layoutBlocks([], limits), []);
});

test("a block is found by its path, or is gone", () => {
  assert.equal(blockAt(time, [0, 1])?.name, "<img src=x onerror=alert(1)>");
  assert.equal(blockAt(time, [0, 7]), null);
  assert.equal(blockAt(time, []), null);
});

test("arrow keys go to the neighbour and stop at the edge", () => {
  const placed = layoutBlocks(time, limits);
  const named = (name: string): (typeof placed)[number] => placed.find((one) => one.block.name === name) ?? assert.fail(name);
  const go = (name: string, direction: "up" | "down" | "left" | "right"): string => neighbour(placed, named(name), direction).block.name;
  assert.equal(go("backward", "down"), "forward");
  assert.equal(go("forward", "up"), "backward");
  assert.equal(go("forward", "right"), "attention");
  assert.equal(go("attention", "left"), "forward");
  assert.equal(go("backward", "right"), "backward");
  assert.equal(go("backward", "up"), "backward");
});
