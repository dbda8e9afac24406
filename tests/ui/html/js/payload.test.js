// Data blocks as payload.py writes them.

import "./page.js";

import assert from "node:assert/strict";
import { test } from "node:test";
import { deflateSync } from "node:zlib";

import { decodeBlock, unzigzag } from "../../../../src/stepscope/ui/html/page/payload.js";

/** Bytes transposed: all lowest bytes first. @param {number[]} values @param {number} width */
const planes = (values, width) => Buffer.from(
  Array.from({ length: width }, (_, k) => values.map((value) => Math.floor(value / 256 ** k) % 256)).flat());

/** @param {object} head @param {Buffer[]} columns */
function encode(head, columns) {
  const text = Buffer.from(JSON.stringify(head));
  const size = Buffer.alloc(4);
  size.writeUInt32LE(text.length);
  return deflateSync(Buffer.concat([size, text, ...columns])).toString("base64");
}

test("columns of every width come back", async () => {
  const times = [0, 2 ** 40 + 7, 5];
  const head = { title: "µ", columns: [["small", 3, 1], ["times", 3, 6], ["zero", 2, 0]] };
  const data = await decodeBlock(encode(head, [planes([1, 2, 255], 1), planes(times, 6)]));
  assert.equal(data.title, "µ");
  assert.deepEqual([...data.columns.small], [1, 2, 255]);
  assert.ok(data.columns.small instanceof Uint8Array);
  assert.deepEqual([...data.columns.times], times);
  assert.deepEqual([...data.columns.zero], [0, 0]);
});

test("a damaged block is refused", async () => {
  await assert.rejects(decodeBlock("bm90IGRlZmxhdGVk"));
});

test("zigzag keeps small magnitudes small", () => {
  assert.deepEqual([0, 1, 2, 3, 4].map(unzigzag), [0, -1, 1, -2, 2]);
});
