// Ranks by steps as colours, and next to each rank its typical value as a bar.

import { hatchIn, oncePerFrame, sizeCanvas } from "./canvas.js";
import { canvasIn, fillTip, inputIn, partIn, partsIn, placeTip } from "./dom.js";
import { duration, exactMilliseconds } from "./format.js";
import { getColors, HEATS } from "./palette.js";

/** @typedef {import("./palette.js").Colors} Colors */
/** A cell, or a whole rank when `step` is -1; `row` is where it is drawn, `place` which rank it is. @typedef {{ row: number, place: number, step: number }} Spot */
/** @typedef {Record<string, Float64Array>} Values */
/** @typedef {{ low: number, high: number, cut: boolean, most: number }} Scale `cut` when values lie above `high` */

/**
 * @typedef {object} HeatData
 * @property {number[]} ranks
 * @property {string[]} hosts
 * @property {number[]} host of each rank: its place among the hosts, or -1
 * @property {number[]} steps
 * @property {[string, string, string][]} metrics id, label, what to look for
 * @property {[number, string][]} stragglers rank and cause
 * @property {import("./payload.js").Columns} columns
 */

const HEAD = 24;
const GUTTER = 138;
const SIDE = 300;
const WIDEST_CELL = 96;
const ROOM = 440;
const STRIP = { height: 56, margin: 20 };

/** Values come one larger than they are: zero stands for a step that a rank lacks. @param {import("./payload.js").Columns} columns @returns {Values} */
export function heatValues({ step, comm, input }) {
  const known = (/** @type {ArrayLike<number>} */ column) => Float64Array.from(column, (value) => (value ? value - 1 : NaN));
  const values = { step: known(step), comm: known(comm), input: known(input) };
  return { own: values.step.map((ns, i) => ns - values.comm[i]), ...values };
}

/** The median of each rank's steps. @param {Float64Array} values @param {number} ranks @param {number} steps */
export function medians(values, ranks, steps) {
  return Float64Array.from({ length: ranks }, (_, rank) => {
    const own = values.subarray(rank * steps, (rank + 1) * steps).filter((value) => !Number.isNaN(value)).sort();
    return own.length ? (own[(own.length - 1) >> 1] + own[own.length >> 1]) / 2 : NaN;
  });
}

/**
 * From pale to dark, so that noise stays pale: times around their median reach at least 15% above
 * it, waits begin at zero and reach at least a twentieth of a step.
 * @param {string} metric @param {Values} values @returns {Scale}
 */
export function heatScale(metric, values) {
  const sorted = values[metric].filter((value) => !Number.isNaN(value)).sort();
  const step = values.step.filter((value) => !Number.isNaN(value)).sort();
  const at = (/** @type {Float64Array} */ list, /** @type {number} */ share) =>
    (list.length ? list[Math.floor(share * (list.length - 1))] : 0);
  const [middle, most] = [at(sorted, 0.5), at(sorted, 1)];
  if (metric === "comm" || metric === "input") {
    return { low: 0, high: Math.max(most, at(step, 0.5) * 0.05, 1), cut: false, most };
  }
  const high = Math.min(Math.max(most, middle * 1.15), middle * 2);
  return { low: Math.min(at(sorted, 0.02), middle * 0.95), high: high || 1, cut: most > high, most };
}

/** The largest value from `from` up to `to`, NaN where none is known. @param {Float64Array} values @param {number} from @param {number} to */
function largest(values, from, to) {
  let most = NaN;
  for (let i = from; i < to; i++) if (!(most >= values[i]) && !Number.isNaN(values[i])) most = values[i];
  return most;
}

export class HeatMap {
  /** @param {HTMLElement} root @param {(rank: number) => void} onPick */
  constructor(root, onPick) {
    this.root = root;
    this.onPick = onPick;
    this.canvas = canvasIn(root, ".hm-canvas");
    this.scroller = partIn(root, ".hm-scroll");
    this.space = partIn(root, ".hm-space");
    this.strip = canvasIn(root, ".hm-strip");
    this.tip = partIn(root, ".tip");
    this.sorting = inputIn(root, ".hm-order");
    this.buttons = partsIn(root, "[data-metric]");
    /** @type {HeatData} */
    this.data = { ranks: [], hosts: [], host: [], steps: [], metrics: [], stragglers: [], columns: {} };
    this.metric = "";
    this.row = 24;
    /** @type {number[]} */
    this.order = [];
    /** @type {Map<number, string>} */
    this.stragglers = new Map();
    /** @type {Values} */
    this.values = {};
    /** @type {Values} */
    this.typical = {};
    /** @type {Scale} */
    this.scale = { low: 0, high: 1, cut: false, most: 1 };
    /** @type {Spot | null} */
    this.hover = null;
    this.draw = oncePerFrame(() => this.drawNow());
    this.listen();
  }

  listen() {
    this.buttons.forEach((button) => button.addEventListener("click", () => this.choose(button.dataset.metric ?? "")));
    this.sorting.addEventListener("change", () => this.sort());
    this.scroller.addEventListener("scroll", () => this.draw(), { passive: true });
    this.canvas.addEventListener("pointermove", (event) => this.move(event));
    this.canvas.addEventListener("pointerleave", () => this.setHover(null));
    this.canvas.addEventListener("click", (event) => this.pick(event));
    this.strip.addEventListener("click", (event) => this.goTo(event));
    new ResizeObserver(() => this.draw()).observe(this.root);
  }

  /** @param {HeatData} data */
  load(data) {
    this.data = data;
    this.stragglers = new Map(data.stragglers);
    this.values = heatValues(data.columns);
    const [ranks, steps] = [data.ranks.length, data.steps.length];
    this.typical = Object.fromEntries(Object.entries(this.values).map(([name, values]) => [name, medians(values, ranks, steps)]));
    this.row = ranks <= 24 ? 24 : ranks <= 64 ? 18 : 15;
    this.sorting.value = ranks * this.row > ROOM - HEAD ? "value" : "rank";
    this.choose(data.metrics[0][0]);
  }

  /** @param {string} metric */
  choose(metric) {
    this.metric = metric;
    this.scale = heatScale(metric, this.values);
    this.buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.metric === metric)));
    partIn(this.root, ".hm-low").textContent = duration(this.scale.low);
    partIn(this.root, ".hm-high").textContent = `${this.scale.cut ? "≥ " : ""}${duration(this.scale.high)}`;
    partIn(this.root, ".hm-about").textContent = this.data.metrics.find(([id]) => id === metric)?.[2] ?? "";
    this.sort();
  }

  sort() {
    const typical = this.typical[this.metric];
    this.order = this.data.ranks.map((_, place) => place);
    if (this.sorting.value === "value") this.order.sort((a, b) => (typical[b] || 0) - (typical[a] || 0) || a - b);
    this.draw();
  }

  measure() {
    const total = this.order.length * this.row + HEAD;
    const height = Math.min(ROOM, total);
    const narrow = this.root.clientWidth < 700;
    const gutter = narrow ? 92 : GUTTER;
    const side = narrow ? 110 : SIDE;
    const steps = this.data.steps.length;
    const room = Math.max(60, this.scroller.clientWidth - gutter - side);
    const cell = Math.min(WIDEST_CELL, room / Math.max(steps, 1));
    this.scroller.style.height = `${height}px`;
    this.space.style.height = `${total}px`;
    return { width: this.scroller.clientWidth, height, gutter, cell, end: gutter + cell * steps, side, scrolls: total > height };
  }

  drawNow() {
    if (!this.metric) return;
    this.layout = this.measure();
    const { width, height } = this.layout;
    const ctx = sizeCanvas(this.canvas, width, height);
    const colors = getColors();
    ctx.fillStyle = colors.back;
    ctx.fillRect(0, 0, width, height);
    ctx.textBaseline = "middle";
    const top = this.scroller.scrollTop;
    const first = Math.floor(top / this.row);
    const last = Math.min(this.order.length, Math.ceil((top + height) / this.row) + 1);
    for (let row = first; row < last; row++) this.drawRow(ctx, colors, this.order[row], HEAD + row * this.row - top);
    this.drawHead(ctx, colors);
    this.drawHover(ctx, colors, top);
    this.strip.hidden = !this.layout.scrolls;
    if (this.layout.scrolls) this.drawStrip(colors, first, last);
  }

  /** Where things lie; drawn at least once before anybody points at anything. */
  get placed() {
    return /** @type {ReturnType<HeatMap["measure"]>} */ (this.layout);
  }

  /** @param {CanvasRenderingContext2D} ctx @param {Colors} colors @param {number} place @param {number} y */
  drawRow(ctx, colors, place, y) {
    const { gutter, cell, end, side } = this.placed;
    const cause = this.stragglers.get(this.data.ranks[place]);
    ctx.font = `${cause ? "600 " : ""}12px ${colors.font}`;
    ctx.fillStyle = cause ? colors.high : colors.text;
    ctx.textAlign = "right";
    ctx.fillText(`rank ${this.data.ranks[place]}`, gutter - 12, y + this.row / 2 + 0.5);
    ctx.textAlign = "left";
    if (cause) ctx.fillRect(0, y + 1, 4, this.row - 2);
    this.drawCells(ctx, colors, place, y);
    const value = this.typical[this.metric][place];
    const most = this.scale.most || 1;
    const room = Math.max(20, side - 190);
    ctx.fillStyle = cause ? colors.high : colors.strong;
    if (value > 0) ctx.fillRect(end + 18, y + this.row / 2 - 4, Math.max(1, (room * value) / most), 8);
    ctx.fillStyle = cause ? colors.high : colors.muted;
    const words = Number.isNaN(value) ? "not recorded" : duration(value);
    const at = end + 26 + (value > 0 ? (room * value) / most : 0);
    ctx.fillText(cell && cause && side > 200 ? `${words}  ${cause}` : words, at, y + this.row / 2 + 0.5);
  }

  /** Where steps are narrower than a pixel the slowest of them gives it its colour. @param {CanvasRenderingContext2D} ctx @param {Colors} colors @param {number} place @param {number} y */
  drawCells(ctx, colors, place, y) {
    const { gutter, cell } = this.placed;
    const steps = this.data.steps.length;
    const group = Math.max(1, Math.ceil(1 / cell));
    const gap = cell > 8 ? 1 : 0;
    for (let step = 0; step < steps; step += group) {
      const value = largest(this.values[this.metric], place * steps + step, place * steps + Math.min(steps, step + group));
      const x = gutter + step * cell;
      const width = Math.max(cell * group - gap, 1);
      if (Number.isNaN(value)) {
        ctx.fillStyle = hatchIn(ctx, colors.strong);
        ctx.fillRect(x, y, width, this.row - 1);
        continue;
      }
      const shade = this.shade(value);
      ctx.fillStyle = colors.heat[shade].color;
      ctx.fillRect(x, y, width, this.row - 1);
      if (cell < 56 || this.row < 18) continue;
      ctx.fillStyle = colors.heat[shade].ink;
      ctx.textAlign = "center";
      ctx.font = `11.5px ${colors.font}`;
      ctx.fillText(duration(value), x + width / 2, y + this.row / 2 + 0.5);
      ctx.textAlign = "left";
    }
  }

  /** @param {number} value */
  shade(value) {
    const { low, high } = this.scale;
    const share = Math.min(1, Math.max(0, (value - low) / (high - low || 1)));
    return Math.round(share * (HEATS - 1));
  }

  /** @param {CanvasRenderingContext2D} ctx @param {Colors} colors */
  drawHead(ctx, colors) {
    const { width, gutter, cell, end, side } = this.placed;
    ctx.fillStyle = colors.back;
    ctx.fillRect(0, 0, width, HEAD - 2);
    ctx.font = `11px ${colors.font}`;
    ctx.fillStyle = colors.muted;
    const every = Math.max(1, Math.ceil(46 / cell));
    ctx.textAlign = "center";
    this.data.steps.forEach((number, i) => {
      if (i % every) return;
      const text = cell > 56 ? `step ${number}` : String(number);
      ctx.fillText(text, gutter + i * cell + Math.min(cell, 60) / 2, HEAD / 2);
    });
    ctx.textAlign = "right";
    if (cell <= 56) ctx.fillText("step", gutter - 12, HEAD / 2);
    ctx.textAlign = "left";
    ctx.fillText(side > 200 ? "median of the rank's steps" : "median", end + 18, HEAD / 2);
  }

  /** @param {CanvasRenderingContext2D} ctx @param {Colors} colors @param {number} top */
  drawHover(ctx, colors, top) {
    if (!this.hover) return;
    const { width, gutter, cell } = this.placed;
    const { row, step } = this.hover;
    ctx.strokeStyle = colors.text;
    ctx.lineWidth = 1.5;
    const y = HEAD + row * this.row - top;
    if (step >= 0) ctx.strokeRect(gutter + step * cell, y, Math.max(cell - 1, 2), this.row - 1);
    else ctx.strokeRect(0.75, y, width - 1.5, this.row - 1);
  }

  /** All ranks at once, by number, to reach a rank when the rows have to scroll. @param {Colors} colors @param {number} first @param {number} last rows in sight */
  drawStrip(colors, first, last) {
    const width = this.placed.width - GUTTER - STRIP.margin;
    const { ranks } = this.data;
    const ctx = sizeCanvas(this.strip, this.placed.width, STRIP.height);
    ctx.fillStyle = colors.back;
    ctx.fillRect(0, 0, this.placed.width, STRIP.height);
    ctx.font = `11px ${colors.font}`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "right";
    ctx.fillStyle = colors.muted;
    ctx.fillText("all ranks", GUTTER - 12, 20);
    const typical = this.typical[this.metric];
    const size = width / ranks.length;
    for (let x = 0; x < width; x += Math.max(1, size)) {
      const from = Math.floor(x / size);
      const value = largest(typical, from, Math.min(ranks.length, Math.max(Math.floor((x + 1) / size), from + 1)));
      if (Number.isNaN(value)) continue;
      ctx.fillStyle = colors.heat[this.shade(value)].color;
      ctx.fillRect(GUTTER + x, 8, Math.max(1, size) + 0.3, 24);
    }
    const inSight = new Set(this.order.slice(first, last));
    ranks.forEach((rank, place) => {
      const x = GUTTER + (place + 0.5) * size;
      if (inSight.has(place)) {
        ctx.fillStyle = colors.accent;
        ctx.fillRect(x - Math.max(size, 1) / 2, 34, Math.max(size, 1), 2.5);
      }
      if (!this.stragglers.has(rank)) return;
      ctx.fillStyle = colors.high;
      ctx.beginPath();
      ctx.moveTo(x, 8);
      ctx.lineTo(x - 5, 0);
      ctx.lineTo(x + 5, 0);
      ctx.fill();
    });
    ctx.fillStyle = colors.muted;
    ctx.textAlign = "left";
    ctx.fillText(`rank ${ranks[0]}`, GUTTER, 46);
    ctx.textAlign = "right";
    ctx.fillText(`rank ${ranks[ranks.length - 1]}`, GUTTER + width, 46);
  }

  /** @param {MouseEvent} pointer */
  goTo({ offsetX }) {
    const width = this.placed.width - GUTTER - STRIP.margin;
    const place = Math.floor(((offsetX - GUTTER) / width) * this.data.ranks.length);
    if (place < 0 || place >= this.data.ranks.length) return;
    const row = this.order.indexOf(place);
    this.scroller.scrollTop = row * this.row - this.placed.height / 2;
    this.setHover({ row, place, step: -1 });
  }

  /** @param {MouseEvent} pointer @returns {Spot | null} */
  spotAt({ offsetX, offsetY }) {
    const { gutter, cell, end } = this.placed;
    const row = Math.floor((offsetY - HEAD + this.scroller.scrollTop) / this.row);
    if (offsetY < HEAD || row < 0 || row >= this.order.length) return null;
    const inside = offsetX >= gutter && offsetX < end;
    return { row, place: this.order[row], step: inside ? Math.floor((offsetX - gutter) / cell) : -1 };
  }

  /** @param {PointerEvent} event */
  move(event) {
    if (!this.layout) return;
    this.setHover(this.spotAt(event));
    if (!this.hover) return;
    this.fillTip(this.hover);
    placeTip(this.tip, event);
  }

  /** @param {MouseEvent} event */
  pick(event) {
    const spot = this.spotAt(event);
    if (spot) this.onPick(this.data.ranks[spot.place]);
  }

  /** @param {Spot | null} spot */
  setHover(spot) {
    this.hover = spot;
    this.canvas.classList.toggle("is-over", Boolean(spot));
    if (!spot) this.tip.hidden = true;
    this.draw();
  }

  /** @param {Spot} spot */
  fillTip({ place, step }) {
    const { data } = this;
    const rank = data.ranks[place];
    const host = data.host[place] >= 0 ? ` · ${data.hosts[data.host[place]]}` : "";
    const cause = this.stragglers.get(rank);
    const lines = data.metrics.map(([id, label]) => {
      const ns = step >= 0 ? this.values[id][place * data.steps.length + step] : this.typical[id][place];
      return `${label}: ${Number.isNaN(ns) ? "not recorded" : exactMilliseconds(ns)}`;
    });
    if (step < 0) lines.unshift("median of its steps");
    if (cause) lines.push(`holds the others back: ${cause}`);
    fillTip(this.tip, `Rank ${rank}${host}${step >= 0 ? ` · step ${data.steps[step]}` : ""}`, lines);
  }
}
