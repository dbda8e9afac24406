// All steps of a run: what is decoded, summed up in pyramids, and gathered into columns of pixels.

import "./page.js";

import assert from "node:assert/strict";
import { test } from "node:test";

import { timeStep } from "../../../../src/stepscope/ui/html/page/run_chart.js";
import { sumBins } from "../../../../src/stepscope/ui/html/page/run_histogram.js";
import { hasRoom, level, levelRange, levelTicks, roundLevel, standsOut, union } from "../../../../src/stepscope/ui/html/page/run_paint.js";
import { BASE, buildPyramid, emptyColumns, gather, mergeChanges, RunScene } from "../../../../src/stepscope/ui/html/page/run_series.js";

const zigzag = (/** @type {number} */ value) => (value >= 0 ? 2 * value : -2 * value - 1);
const MIDDLE = { mean: 10_000, median: 10_000, p99: 40_000 };

/** Steps of 10 ms; every tenth is a stall of 40 ms for data. @param {number} many @param {Partial<SeriesHead>[]} heads @returns {RunData} */
function makeRun(many, heads = [{}]) {
  /** @type {Columns} */
  const columns = {};
  const step = Uint32Array.from({ length: many }, (_, i) => (i % 10 === 9 ? 40_000 : 10_000));
  heads.forEach((_, place) => {
    columns[`${place}-number`] = new Uint8Array(many); // one more than the last
    columns[`${place}-start`] = new Uint8Array(many); // when the last one ended
    columns[`${place}-step`] = step;
    columns[`${place}-cause`] = Uint8Array.from(step, (us) => (us > 10_000 ? 1 : 0));
    columns[`${place}-window`] = new Uint8Array(many);
  });
  columns.bins = new Uint32Array(heads.length * 3 * 4).map((_, i) => i);
  const series = heads.map((head, rank) => ({
    rank, attempt: 1, steps: many, drawn: many, warm_up: 0, offset: 0, changes: [], ...MIDDLE, ...head,
  }));
  const causes = /** @type {[string, string, string][]} */ ([["data", "Data stalls", ""], ["gc", "GC pauses", ""]]);
  return { zero_ms: 0, unit_us: 1000, causes, series, all: MIDDLE, bin_low_us: 9_000, bin_high_us: 50_000, columns };
}

test("numbers and starts are the sums of what is stored", () => {
  const data = makeRun(4);
  data.columns["0-number"] = Uint8Array.of(zigzag(7), 0, zigzag(2), 0);
  data.columns["0-start"] = Uint8Array.of(zigzag(5), 0, zigzag(3), zigzag(-1));
  const [series] = new RunScene(data).series;
  assert.deepEqual([...series.number], [7, 8, 11, 12]);
  assert.deepEqual([...series.start], [5_000, 15_000, 28_000, 37_000]);
});

test("a pyramid keeps extremes, sums and the longest stall of each cause", () => {
  const { series: [series] } = new RunScene(makeRun(1000));
  for (const { size, low, high, sum, calm, stall } of series.levels) {
    assert.equal(low.length, Math.ceil(1000 / size));
    assert.equal(Math.min(...low), 10_000);
    assert.equal(Math.max(...high), 10_000);
    assert.equal(sum.reduce((a, b) => a + b), 900 * 10_000);
    assert.equal(calm.reduce((a, b) => a + b), 900);
    assert.equal(Math.max(.../** @type {Float32Array} */ (stall[0])), 40_000);
    assert.equal(stall[1], null); // no step stalled for it
  }
  assert.equal(series.levels[0].size, BASE);
});

test("steps in a window are in no bucket", () => {
  const step = Uint32Array.of(10, 20, 30);
  const [level] = buildPyramid({ step, calm: step, cause: Uint8Array.of(0, 0, 0), window: Uint8Array.of(0, 0, 1) }, 1);
  assert.deepEqual([level.high[0], level.calm[0]], [20, 2]);
});

test("columns of pixels show the same whether they come from buckets or from steps", () => {
  const scene = new RunScene(makeRun(4000));
  const view = { t0: 0, t1: 4000 };
  for (const width of [100, 1000]) { // 40 steps a column, then 4: fewer than in the smallest bucket
    const columns = emptyColumns(width, scene.series);
    const line = gather(scene.series[0], view, columns);
    assert.deepEqual([Math.min(...columns.low), Math.max(...columns.high)], [10_000, 10_000]);
    assert.equal(Math.max(.../** @type {Float32Array} */ (columns.stall[0])), 40_000);
    assert.ok(line.every((us) => us === 10_000));
  }
});

test("a single long step among a million is seen at every zoom", () => {
  const data = makeRun(100_000);
  data.columns["0-step"] = data.columns["0-step"].slice();
  data.columns["0-step"][54_329] = 7_000_000;
  const scene = new RunScene(data);
  for (const t1 of [100_000, 80_000, 60_000]) {
    const columns = emptyColumns(700, scene.series);
    gather(scene.series[0], { t0: 0, t1 }, columns);
    const longest = /** @type {Float32Array} */ (columns.stall[0]);
    assert.ok(Math.abs(longest.indexOf(7_000_000) - (54_329 * 700) / t1) < 2);
  }
});

test("attempts of a restarted job lie one after another", () => {
  const scene = new RunScene(makeRun(50, [{}, { rank: 0, attempt: 2, offset: 50 }]));
  assert.deepEqual(scene.series.map(({ x }) => x[0]), [0, 50]);
  assert.deepEqual(scene.series.map(({ name }) => name), ["Rank 0, attempt 1", "Rank 0, attempt 2"]);
  assert.equal(scene.span, 100);
});

test("on the axis of time a typical step is one unit long", () => {
  const scene = new RunScene(makeRun(100));
  scene.use("time");
  assert.equal(scene.series[0].x[10], 9 + 4); // nine typical steps and one of 40 ms
});

test("changes of several ranks whose intervals meet are one", () => {
  const change = { x: 100, low: 90, high: 110, before: 10, after: 20, ranks: [0] };
  const merged = mergeChanges([change, { ...change, x: 104, low: 96, high: 120, ranks: [1] }, { ...change, x: 300, low: 290, high: 310 }]);
  assert.deepEqual(merged.map(({ x, high, ranks }) => [x, high, ranks]), [[102, 120, [0, 1]], [300, 310, [0]]]);
});

test("the scale holds what is in view and ends at round numbers", () => {
  const { series } = new RunScene(makeRun(1000));
  assert.deepEqual(levelRange("linear", series, { t0: 0, t1: 1000 }), [0, 50_000]);
  const [low, high] = levelRange("typical", series, { t0: 0, t1: 1000 });
  assert.ok(low < 10_000 && high > 10_000 && high < 12_000);
  assert.equal(roundLevel(41_000, true), 50_000);
  assert.equal(roundLevel(41_000, false), 40_000);
});

test("the warm-up does not stretch the scale", () => {
  const data = makeRun(1000, [{ warm_up: 8 }]);
  data.columns["0-step"] = data.columns["0-step"].slice();
  data.columns["0-step"][0] = 30_000_000;
  const { series } = new RunScene(data);
  assert.deepEqual(levelRange("linear", series, { t0: 0, t1: 1000 }), [0, 50_000]);
});

test("a run of one step has a scale", () => {
  const { series } = new RunScene(makeRun(1));
  const [low, high] = levelRange("log", series, { t0: 0, t1: 20 });
  assert.ok(low < 10_000 && high > 10_000);
});

test("ticks lie on the scale and differ", () => {
  const ticks = levelTicks({ name: "log", low: 30_000, high: 8_000_000, y: (us) => us }, 330);
  assert.ok(ticks.every((us) => us >= 30_000 && us <= 8_000_000));
  assert.equal(new Set(ticks.map(level)).size, ticks.length);
});

test("steps are drawn alone where each has three pixels", () => {
  const { series } = new RunScene(makeRun(10_000));
  assert.ok(hasRoom(series, { t0: 0, t1: 200 }, 700));
  assert.ok(!hasRoom(series, { t0: 0, t1: 400 }, 700));
});

test("one rank stands out only if it is clearly slower", () => {
  const { series } = new RunScene(makeRun(10, [{}, { mean: 10_100 }, { mean: 10_500 }]));
  assert.equal(standsOut(series), 2);
  assert.equal(standsOut(series.slice(0, 2)), -1);
});

test("bands that overlap are one", () => {
  assert.deepEqual(union([[5, 8], [0, 2], [7, 9]]), [[0, 2], [5, 9]]);
});

test("the distribution adds up over the ranks that are shown", () => {
  const { columns } = makeRun(10, [{}, {}]);
  assert.deepEqual([...sumBins(columns.bins, 2, 2, [0])[1]], [4, 5, 6, 7]);
  assert.deepEqual([...sumBins(columns.bins, 2, 2, [0, 1])[0]], [12, 14, 16, 18]);
});

test("ticks of time are what clocks show", () => {
  assert.equal(timeStep(0.3e9), 0.5e9);
  assert.equal(timeStep(40e9), 60e9);
  assert.equal(timeStep(2000e9), 3600e9);
  assert.equal(timeStep(3 * 86400e9), 5 * 86400e9);
});
