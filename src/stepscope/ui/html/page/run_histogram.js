// The distribution of step times, stalls by cause; mean, median and 99th percentile marked.

import { fillBox, startDrawing, strokeLine, writeText } from "./canvas.js";
import { canvasIn } from "./dom.js";
import { count, duration, trimmed } from "./format.js";
import { HoverChart } from "./hover_chart.js";
import { getColors } from "./palette.js";
import { level, levelTicks, tag } from "./run_paint.js";

const LEFT = 52;
const TOP = 52;
const BOTTOM = 26;
const MARKS = /** @type {const} */ (["median", "mean", "p99"]);
const DASHES = { median: [6, 4], mean: [], p99: [2, 3] };
const MARK_WORDS = { median: "median", mean: "mean", p99: "99th percentile" };

/** Steps by cause (none first) and bin, of these series. @param {ArrayLike<number>} bins @param {number} causes @param {number} series @param {number[]} places */
export function sumBins(bins, causes, series, places) {
  const block = bins.length / series;
  const many = block / (causes + 1);
  const sums = Array.from({ length: causes + 1 }, () => new Float64Array(many));
  for (const place of places) {
    for (let i = 0; i < block; i++) sums[Math.floor(i / many)][i % many] += bins[place * block + i];
  }
  return sums;
}

export class RunHistogram extends HoverChart {
  constructor(/** @type {HTMLElement} */ root) {
    super(root, canvasIn(root, ".run-histogram"));
    this.data = /** @type {RunData | null} */ (null);
    this.sums = /** @type {Float64Array[]} */ ([]);
    this.middle = /** @type {Middle} */ ({ mean: 1, median: 1, p99: 1 });
  }

  /** @param {RunData} data @param {RunSeries[]} shown */
  load(data, shown) {
    this.data = data;
    this.sums = sumBins(data.columns.bins, data.causes.length, data.series.length, shown.map(({ place }) => place));
    this.middle = shown.length === 1 ? shown[0].head : data.all;
    this.draw();
  }

  get many() { return this.sums[0].length; }

  total(/** @type {number} */ bin) { return this.sums.reduce((sum, counts) => sum + counts[bin], 0); }

  /** A bin's edge, in µs. @param {number} bin */
  edge(bin) {
    const { bin_low_us: low, bin_high_us: high } = /** @type {RunData} */ (this.data);
    return low * (high / low) ** (bin / this.many);
  }

  measure() {
    const box = /** @type {HTMLElement} */ (this.canvas.parentElement);
    const [width, height] = [Math.max(120, box.clientWidth), Math.max(160, box.clientHeight)];
    const { bin_low_us: low, bin_high_us: high } = /** @type {RunData} */ (this.data);
    const most = Math.max(1, ...Array.from({ length: this.many }, (_, bin) => this.total(bin)));
    const room = height - TOP - BOTTOM;
    return {
      width, height,
      x: (/** @type {number} */ us) => LEFT + ((width - LEFT - 10) * Math.log(us / low)) / Math.log(high / low),
      /** One step is a tenth of a power of ten high, so that it can be seen. */
      tall: (/** @type {number} */ steps) => (steps ? (room * (Math.log10(steps) + 0.25)) / (Math.log10(most) + 0.25) : 0),
      most,
    };
  }

  /** @override */
  drawNow() {
    if (!this.data) return;
    const frame = this.measure();
    const ctx = startDrawing(this.canvas, frame.width, frame.height);
    this.paintAxes(ctx, frame);
    for (let bin = 0; bin < this.many; bin++) this.paintBar(ctx, frame, bin);
    this.paintMarks(ctx, frame);
  }

  /** @param {Ctx} ctx @param {ReturnType<RunHistogram["measure"]>} frame */
  paintAxes(ctx, { width, height, x, tall, most }) {
    const colors = getColors();
    const bottom = height - BOTTOM;
    for (let steps = 1; steps <= most; steps *= 10) {
      const y = Math.round(bottom - tall(steps));
      fillBox(ctx, colors.line, LEFT, y, width - LEFT, 1);
      writeText(ctx, colors.muted, count(steps), LEFT - 6, y, "right");
    }
    fillBox(ctx, colors.strong, LEFT, bottom, width - LEFT, 1);
    const [low, high] = [this.edge(0), this.edge(this.many)];
    let last = -Infinity;
    for (const us of levelTicks({ name: "log", low, high, y: x }, (width - LEFT) / 2)) {
      const words = level(us);
      const half = ctx.measureText(words).width / 2;
      if (x(us) - half < Math.max(last + 8, LEFT) || x(us) + half > width) continue;
      last = x(us) + half;
      fillBox(ctx, colors.strong, Math.round(x(us)), bottom, 1, 5);
      writeText(ctx, colors.muted, words, x(us), bottom + 14, "center");
    }
  }

  /** A bar is as tall as its steps on a logarithmic scale; its colours have their shares of it. @param {Ctx} ctx @param {ReturnType<RunHistogram["measure"]>} frame @param {number} bin */
  paintBar(ctx, { height, x, tall }, bin) {
    const colors = getColors();
    const total = this.total(bin);
    const [left, right] = [x(this.edge(bin)), x(this.edge(bin + 1))];
    let y = height - BOTTOM;
    this.sums.forEach((counts, cause) => {
      const part = total ? (tall(total) * counts[bin]) / total : 0;
      if (!part) return;
      fillBox(ctx, cause ? colors.stalls[cause - 1].solid : colors.calm.line, left, y - part, Math.max(right - left - (right - left > 3 ? 1 : 0), 1), part);
      y -= part;
    });
    if (bin === this.hover) fillBox(ctx, colors.grey, left, TOP, right - left, height - TOP - BOTTOM);
  }

  /** Names stand on lines of their own, so that close ones can be read. @param {Ctx} ctx @param {ReturnType<RunHistogram["measure"]>} frame */
  paintMarks(ctx, { width, height, x }) {
    const colors = getColors();
    const marks = MARKS.toSorted((a, b) => this.middle[a] - this.middle[b])
      .map((name, row) => ({ name, at: Math.round(x(this.middle[name])) + 0.5, y: 9 + row * 15 }));
    marks.forEach(({ name, at, y }) => {
      ctx.setLineDash(DASHES[name]);
      strokeLine(ctx, colors.text, 1.25, [[at, y - 6], [at, height - BOTTOM]]);
    });
    ctx.setLineDash([]);
    marks.forEach(({ name, at, y }) => {
      const words = `${MARK_WORDS[name]} ${duration(this.middle[name] * 1e3)}`;
      const fits = at + 5 + ctx.measureText(words).width < width;
      tag(ctx, colors, words, fits ? at + 6 : at - 6, y, fits ? "left" : "right");
    });
  }

  /** @override @param {MouseEvent} pointer */
  eventAt({ offsetX }) {
    if (!this.data) return -1;
    const { width } = this.measure();
    const bin = Math.floor(((offsetX - LEFT) / (width - LEFT - 10)) * this.many);
    return bin >= 0 && bin < this.many && this.total(bin) ? bin : -1;
  }

  /** @override @param {number} bin */
  tipText(bin) {
    const { causes } = /** @type {RunData} */ (this.data);
    const lines = causes.flatMap(([, label], cause) => (this.sums[cause + 1][bin] ? [`${label} ${count(this.sums[cause + 1][bin])}`] : []));
    const calm = this.sums[0][bin] ? [`no stall ${count(this.sums[0][bin])}`] : [];
    const [from, to] = [this.edge(bin), this.edge(bin + 1)].map((us) => trimmed(duration(us * 1e3)));
    return [`${count(this.total(bin))} steps of ${from} to ${to}`, ...calm, ...lines];
  }
}
