// Figures and names as text. tests/records/test_figures.py puts the same cases through Python.

import "./page.js";

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import * as format from "../../../../src/stepscope/ui/html/page/format.js";

/** @type {[string, number, string][]} */
const CASES = JSON.parse(readFileSync(new URL("../../../records/figures.json", import.meta.url), "utf8"));

test("figures are written by the rules shared with Python", () => {
  for (const [name, value, text] of CASES) {
    const spelled = name.replace(/_(\w)/g, (_, letter) => letter.toUpperCase());
    const write = /** @type {Record<string, any>} */ (format)[spelled];
    assert.equal(write(value), text, `${name}(${value})`);
  }
});

test("ties go to the even digit, as in Python", () => {
  assert.equal(format.significant(0.125), "0.125");
  assert.equal(format.duration(2.5), "2 ns");
  assert.equal(format.duration(3.5), "4 ns");
  assert.equal(format.significant(1000.5), "1,000");
  assert.equal(format.significant(1001.5), "1,002");
});

test("rates carry their unit", () => {
  assert.equal(format.rate(12.34e12, "FLOP/s"), "12.3 TFLOP/s");
  assert.equal(format.rate(456e9, "B/s"), "456 GB/s");
});

test("exact times keep microseconds", () => {
  assert.equal(format.exactMilliseconds(1234567891), "1,234.568 ms");
});

test("counts are grouped and agree with their noun", () => {
  assert.equal(format.counted(1, "event"), "1 event");
  assert.equal(format.counted(1234567, "event"), "1,234,567 events");
});

test("ticks have as many digits as neighbours need to differ", () => {
  assert.equal(format.tick(0, 1e6), "0");
  assert.equal(format.tick(3e6, 1e6), "3 ms");
  assert.equal(format.tick(1.5e6, 5e5), "1,500 µs");
  assert.equal(format.tick(2.5e9, 1e8), "2,500 ms");
});

test("short names keep what sets events apart", () => {
  assert.equal(format.shortName("/home/me/train.py(31): step"), "step  train.py:31");
  assert.equal(format.shortName("void at::native::vectorized_elementwise_kernel<4, F>(int, F)"), "vectorized_elementwise_kernel<…>");
  assert.equal(format.shortName("Memcpy HtoD (Pageable -> Device)"), "Memcpy HtoD (Pageable -> Device)");
});

test("sentences start with a capital, names of code do not", () => {
  assert.equal(format.sentence("idle while the host ran"), "Idle while the host ran");
  assert.equal(format.sentence("aten is a name"), "aten is a name");
  assert.equal(format.sentence("all_reduce: 5 calls"), "all_reduce: 5 calls");
});
