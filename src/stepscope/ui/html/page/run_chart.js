// Step time over the run: what is in view, which ranks, on which scale; tips; the whole run below.

import { fillBox, startDrawing, strokeBox, writeText } from "./canvas.js";
import { canvasIn, partIn, partsIn } from "./dom.js";
import { clockTime, count, duration, longDuration, longTick } from "./format.js";
import { getColors } from "./palette.js";
import { roundStep } from "./ruler.js";
import { hasRoom, level, levelRange, levelScale, levelTicks, paintRun, standsOut } from "./run_paint.js";
import { emptyColumns, gather } from "./run_series.js";
import { TimeView } from "./time_view.js";

const RULER = 24;
const OVERVIEW = 34;
const NEAR = 12; // pixels from the pointer to a step
const AROUND = 60; // steps shown on each side of one that is looked for
const LOG_FROM = 6; // the longest step over the median: from here on a logarithmic scale
/** Round times, in seconds. */
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

/** A distance between ticks on an axis of time. @param {number} least in ns */
export function timeStep(least) {
  if (least <= 1e9) return roundStep(least);
  const seconds = SECONDS.find((step) => step * 1e9 >= least);
  return (seconds ?? 86400 * roundStep(least / 86400e9)) * 1e9;
}

/** Steps are numbered through all series. @extends {TimeView<RunScene>} */
export class RunChart extends TimeView {
  constructor(/** @type {HTMLElement} */ root) {
    super(root, "run", 0);
    this.levels = canvasIn(root, ".run-levels");
    this.overview = canvasIn(root, ".run-overview");
    this.status = partIn(root, ".run-status");
    this.slowest = partIn(root, ".run-slowest");
    this.shown = /** @type {RunSeries[]} */ ([]);
    this.hidden = /** @type {Set<number>} */ (new Set());
    this.scaleName = /** @type {ScaleName} */ ("linear");
    this.frameMs = 0;
    this.resting = /** @type {ReturnType<typeof setTimeout> | undefined} */ (undefined);
    this.around = /** @type {number[] | null} */ (null); // steps that a tip sums up
    this.picture = { key: "", canvas: document.createElement("canvas") };
    this.scroller.addEventListener("keydown", (event) => this.key(event));
    this.overview.addEventListener("pointerdown", (event) => this.grab(event));
    this.overview.addEventListener("pointermove", (event) => event.buttons && this.centre(event.offsetX));
    partsIn(root, "[data-scale]").forEach((button) => button.addEventListener("click", () => this.useScale(/** @type {ScaleName} */ (button.dataset.scale))));
    partsIn(root, "[data-axis]").forEach((button) => button.addEventListener("click", () => this.useAxis(/** @type {Axis1D} */ (button.dataset.axis))));
  }

  load(/** @type {RunScene} */ scene) {
    this.scene = scene;
    this.choose(-1);
    const [, longest] = levelRange("linear", this.shown, { t0: 0, t1: scene.span });
    this.useScale(longest > LOG_FROM * scene.data.all.median ? "log" : "linear");
    this.useAxis("step");
  }

  /** Show one series, or all with -1. @param {number} place */
  choose(place) {
    this.shown = place < 0 ? this.drawn.series : [this.drawn.series[place]];
    this.bands();
    this.setHover(-1);
    const slowest = standsOut(this.shown);
    this.slowest.hidden = slowest < 0;
    if (slowest >= 0) partIn(this.slowest, "span").textContent = `${this.shown[slowest].name.toLowerCase()}, the slowest`;
    this.draw();
  }

  bands() { this.shown.forEach((series) => { series.bands = series.windows(); }); }

  useScale(/** @type {ScaleName} */ name) {
    this.scaleName = name;
    partsIn(this.root, "[data-scale]").forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.scale === name)));
    this.draw();
  }

  useAxis(/** @type {Axis1D} */ axis) {
    const share = [this.view.t0 / this.span, this.view.t1 / this.span];
    const fresh = this.view.t1 === 1;
    this.drawn.use(axis);
    this.bands();
    partsIn(this.root, "[data-axis]").forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.axis === axis)));
    if (fresh || share[1] - share[0] > 0.99) this.reset();
    else this.show(share[0] * this.span, share[1] * this.span);
  }

  /** Shows a cause's stalls, or hides them. @param {number} cause @param {boolean} shown */
  showCause(cause, shown) {
    if (shown) this.hidden.delete(cause);
    else this.hidden.add(cause);
    this.draw();
  }

  // ---- gestures

  /** A double click shows everything. @override */
  fit() { this.reset(); }

  /** @override */
  letters() {
    return {
      ...super.letters(), f: () => this.selected >= 0 && this.goTo(this.selected),
      arrowleft: () => this.pan(-0.1), arrowright: () => this.pan(0.1), arrowup: () => this.zoom(1 / 1.35), arrowdown: () => this.zoom(1.35),
      "+": () => this.zoom(1 / 1.35), "-": () => this.zoom(1.35), home: () => this.pan(-1e9), end: () => this.pan(1e9),
      pageup: () => this.pan(-0.9), pagedown: () => this.pan(0.9),
    };
  }

  /** With the whole run in view there is nothing to zoom out to: the page scrolls. @override @param {WheelEvent} event */
  wheel(event) {
    const whole = this.view.t1 - this.view.t0 >= this.span;
    if (!whole || event.deltaY <= 0 || Math.abs(event.deltaX) > event.deltaY) super.wheel(event);
  }

  key(/** @type {KeyboardEvent} */ event) {
    const act = /** @type {Record<string, () => void>} */ (this.letters())[event.key.toLowerCase()];
    if (!act || !this.scene || event.ctrlKey || event.metaKey || event.altKey) return;
    act();
    event.preventDefault();
  }

  grab(/** @type {PointerEvent} */ event) {
    this.overview.setPointerCapture(event.pointerId);
    this.centre(event.offsetX);
  }

  centre(/** @type {number} */ x) {
    const half = (this.view.t1 - this.view.t0) / 2;
    const at = (x / this.width) * this.span;
    this.show(at - half, at + half);
  }

  /** To one step. @param {number} event */
  goTo(event) {
    const [series, i] = this.stepOf(event);
    if (!this.shown.includes(series)) this.choose(series.place);
    this.select(event);
    this.show(series.x[i] - AROUND, series.x[i] + AROUND);
  }

  // ---- steps by number

  /** @param {number} event @returns {[RunSeries, number]} */
  stepOf(event) {
    let rest = event;
    for (const series of this.drawn.series) {
      if (rest < series.length) return [series, rest];
      rest -= series.length;
    }
    return [this.drawn.series[0], 0];
  }

  /** @param {RunSeries} series @param {number} i */
  eventOf(series, i) {
    return this.drawn.series.slice(0, series.place).reduce((sum, { length }) => sum + length, i);
  }

  /** The nearest step where each has room, otherwise the longest under the pointer. @override @param {MouseEvent} pointer */
  eventAt({ offsetX, offsetY }) {
    if (!this.scene) return -1;
    const perPixel = (this.view.t1 - this.view.t0) / this.width;
    const x = this.view.t0 + offsetX * perPixel;
    const alone = hasRoom(this.shown, this.view, this.width);
    this.around = alone ? null : [x - 1.5 * perPixel, x + 1.5 * perPixel];
    const reach = alone ? NEAR * perPixel : 1.5 * perPixel;
    const scale = this.levelScale();
    let [best, bestSeries, score] = [-1, this.shown[0], Infinity];
    for (const series of this.shown) {
      const to = series.at(x + reach);
      for (let i = series.at(x - reach); i < to; i++) {
        const far = alone ? Math.hypot((series.x[i] - x) / perPixel, scale.y(series.step[i]) - offsetY) : -series.step[i];
        if (far < score && (!alone || far < NEAR)) [best, bestSeries, score] = [i, series, far];
      }
    }
    return best < 0 ? -1 : this.eventOf(bestSeries, best);
  }

  /** @override @param {number} event */
  tipText(event) {
    const [series, i] = this.stepOf(event);
    const several = this.drawn.series.length > 1;
    const about = `Step ${count(series.number[i])}${several ? `, ${series.name.toLowerCase()}` : ""}: ${duration(series.step[i] * 1e3)}`;
    const when = `${longDuration(series.start[i] * 1e3)} after the first step`;
    const clock = this.drawn.data.zero_ms ? [clockTime(this.drawn.data.zero_ms + series.start[i] / 1e3)] : [];
    const one = [...this.whatOf(series, i), [when, ...clock].join(" · ")];
    return this.around ? [this.sumUp(), `longest: ${about[0].toLowerCase()}${about.slice(1)}`, ...one] : [about, ...one];
  }

  /** @param {RunSeries} series @param {number} i */
  whatOf(series, i) {
    const cause = series.cause[i] ? this.drawn.data.causes[series.cause[i] - 1] : null;
    if (cause) return [`${cause[1]}: ${cause[2]}`];
    if (series.window[i]) return ["The profiler ran: not counted"];
    return i < series.head.warm_up ? ["Warm-up: not counted"] : [];
  }

  /** All steps under the pointer. */
  sumUp() {
    const [from, to] = /** @type {number[]} */ (this.around);
    let [first, last, low, high, stalls, many] = [Infinity, 0, Infinity, 0, 0, 0];
    for (const series of this.shown) {
      for (let i = series.at(from); i < series.at(to); i++) {
        [first, last] = [Math.min(first, series.number[i]), Math.max(last, series.number[i])];
        [low, high] = [Math.min(low, series.step[i]), Math.max(high, series.step[i])];
        many++;
        if (series.cause[i]) stalls++;
      }
    }
    const ranks = this.shown.length > 1 ? ` of ${count(this.shown.length)} ranks` : "";
    return `Steps ${count(first)} to ${count(last)}${ranks}: ${level(low)} to ${level(high)}, ${count(stalls)} of ${count(many)} stalled`;
  }

  // ---- drawing

  levelScale() { return levelScale(this.scaleName, this.shown, this.view, this.height); }

  get height() { return this.root.clientWidth < 700 ? 250 : 350; }

  /** @override */
  drawNow() {
    if (!this.scene) return;
    const began = performance.now();
    const { view, shown, hidden, height } = this;
    const width = this.measureWidth();
    const ctx = startDrawing(this.canvas, width, height);
    const scale = this.levelScale();
    const colors = getColors();
    paintRun({ ctx, colors, scene: this.scene, shown, view, width, height, scale, hidden });
    [this.selected, this.hover].forEach((event) => this.paintRing(ctx, event, scale));
    this.drawLevels(scale);
    this.drawRuler();
    this.drawOverview();
    this.announce();
    this.frameMs = performance.now() - began;
  }

  /** @param {Ctx} ctx @param {number} event @param {LevelScale} scale */
  paintRing(ctx, event, scale) {
    if (event < 0) return;
    const [series, i] = this.stepOf(event);
    if (!this.shown.includes(series)) return;
    const x = ((series.x[i] - this.view.t0) / (this.view.t1 - this.view.t0)) * this.width;
    ctx.strokeStyle = getColors().text;
    ctx.lineWidth = 1.5;
    ctx.beginPath();
    ctx.arc(x, scale.y(series.step[i]), 8, 0, 2 * Math.PI);
    ctx.stroke();
  }

  drawLevels(/** @type {LevelScale} */ scale) {
    const width = this.gutter.clientWidth;
    const ctx = startDrawing(this.levels, width, this.height);
    const colors = getColors();
    for (const us of levelTicks(scale, this.height)) writeText(ctx, colors.muted, level(us), width - 8, scale.y(us) + 0.5, "right");
  }

  /** @override */
  drawRuler() {
    const { view: { t0, t1 }, width, drawn } = this;
    const ctx = startDrawing(this.ruler, width, RULER);
    const colors = getColors();
    const unit = drawn.axis === "time" ? drawn.unit * 1e3 : 1;
    const least = ((t1 - t0) * unit) / Math.max(2, width / 110);
    const step = drawn.axis === "time" ? timeStep(least) : Math.max(1, roundStep(least));
    const zero = drawn.origin * unit;
    for (let at = Math.ceil((Math.max(t0, 0) * unit + zero) / step) * step; at <= Math.min(t1, this.span) * unit + zero; at += step) {
      const x = (((at - zero) / unit - t0) / (t1 - t0)) * width;
      fillBox(ctx, colors.strong, Math.round(x), 0, 1, 6);
      const words = drawn.axis === "time" ? longTick(at, step) : count(at);
      const half = ctx.measureText(words).width / 2 + 2;
      writeText(ctx, colors.muted, words, Math.max(half, Math.min(width - half, x)), 15, "center");
    }
  }

  /** The whole run, drawn once, and a frame around what is in view. */
  drawOverview() {
    const { width, view, span, shown } = this;
    const key = [width, window.devicePixelRatio, document.documentElement.dataset.theme, this.drawn.axis, shown.map(({ place }) => place), [...this.hidden]].join();
    if (this.picture.key !== key) {
      this.picture.key = key;
      this.paintOverview(startDrawing(this.picture.canvas, width, OVERVIEW));
    }
    const ctx = startDrawing(this.overview, width, OVERVIEW);
    ctx.drawImage(this.picture.canvas, 0, 0, width, OVERVIEW);
    const colors = getColors();
    const [left, right] = [view.t0, view.t1].map((t) => Math.max(0, Math.min(width, (t / span) * width)));
    fillBox(ctx, colors.dim, 0, 0, left, OVERVIEW);
    fillBox(ctx, colors.dim, right, 0, width - right, OVERVIEW);
    strokeBox(ctx, colors.accent, 1.5, left + 0.75, 0.75, Math.max(right - left - 1.5, 2), OVERVIEW - 1.5);
  }

  paintOverview(/** @type {Ctx} */ ctx) {
    const { shown, span, hidden } = this;
    const colors = getColors();
    const columns = emptyColumns(Math.ceil(this.width), shown);
    shown.forEach((series) => gather(series, { t0: 0, t1: span }, columns));
    const [low, high] = levelRange("log", shown, { t0: 0, t1: span });
    const y = (/** @type {number} */ us) => {
      const share = Math.log(us / low) / Math.log(high / low);
      return OVERVIEW - 2 - (OVERVIEW - 6) * Math.max(0, Math.min(1, share));
    };
    const wide = Math.max(1, this.width / Math.max(...shown.map(({ length }) => length)));
    columns.stall.forEach((longest, cause) => longest?.forEach((us, x) => {
      if (us && !hidden.has(cause)) fillBox(ctx, colors.stalls[cause].stem, x, y(us), 1, OVERVIEW - y(us));
    }));
    columns.high.forEach((us, x) => us && fillBox(ctx, colors.calm.line, x, y(us), wide, Math.max(2, y(columns.low[x]) - y(us))));
  }

  /** Once the picture rests, or a screen reader would read out every frame. */
  announce() {
    clearTimeout(this.resting);
    this.resting = setTimeout(() => { this.status.textContent = this.inWords(); }, 200);
  }

  /** For people who do not see the picture. */
  inWords() {
    const { view, span, shown, drawn } = this;
    const share = (view.t1 - view.t0) / span;
    if (share > 0.99) return "";
    const [from, to] = shown[0].inView(view);
    if (to <= from) return "";
    const { number } = shown[0];
    return `${drawn.axis === "time" ? "around steps" : "steps"} ${count(number[from])} to ${count(number[to - 1])}`;
  }
}
