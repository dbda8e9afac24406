// Ranks by steps as colours, under their hosts, and next to each its typical value as a bar.

import { fillBox, fillShape, fitText, hatchIn, startDrawing, strokeBox, strokeLine, writeText } from "./canvas.js";
import { canvasIn, inputIn, partIn, partsIn } from "./dom.js";
import { counted, duration, exactMilliseconds } from "./format.js";
import { hostRow, hostValues, placesByHost, rangeWords, rowsByHost, standsFor } from "./host_rows.js";
import { HoverChart } from "./hover_chart.js";
import { getColors, HEATS } from "./palette.js";

const HEAD = 24;
const GUTTER = 138;
const HOST = { left: 10, least: 60, most: 190, letter: 8.6, small: 7 }; // names left of their ranks
const SIDE = 300;
const WIDEST_CELL = 96;
const ROOM = 440;
const STRIP = { height: 56, margin: 20 };

/** Values come one larger than they are: zero stands for a step that a rank lacks. @param {Columns} columns @returns {HeatValues} */
export function heatValues({ step, comm, input }) {
  const known = (/** @type {ArrayLike<number>} */ column) => Float64Array.from(column, (value) => (value ? value - 1 : NaN));
  const values = { step: known(step), comm: known(comm), input: known(input) };
  return { own: values.step.map((ns, i) => ns - values.comm[i]), ...values };
}

const knownSorted = (/** @type {Float64Array} */ values) => values.filter((value) => !Number.isNaN(value)).sort();

/** The median of each rank's steps. @param {Float64Array} values @param {number} ranks @param {number} steps */
export function medians(values, ranks, steps) {
  return Float64Array.from({ length: ranks }, (_, rank) => {
    const own = knownSorted(values.subarray(rank * steps, (rank + 1) * steps));
    return own.length ? (own[(own.length - 1) >> 1] + own[own.length >> 1]) / 2 : NaN;
  });
}

// From pale to dark, so that noise stays pale: times around their median reach at least 15% above
// it, waits begin at zero and reach at least a twentieth of a step.
/** @param {string} metric @param {HeatValues} values @returns {HeatScale} */
export function heatScale(metric, values) {
  const [sorted, step] = [values[metric], values.step].map(knownSorted);
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

/** A cell has a number, and so has a whole row: -1 stands for the step. A row is a rank, or a host that stands for its ranks. */
export class HeatMap extends HoverChart {
  /** @param {HTMLElement} root @param {(rank: number) => void} onPick */
  constructor(root, onPick) {
    super(root, canvasIn(root, ".hm-canvas"));
    this.onPick = onPick;
    this.scroller = partIn(root, ".hm-scroll");
    this.space = partIn(root, ".hm-space");
    this.strip = canvasIn(root, ".hm-strip");
    this.sorting = inputIn(root, ".hm-order");
    this.buttons = partsIn(root, "[data-metric]");
    /** @type {HeatData} */
    this.data = { ranks: [], hosts: [], places: [], host: [], steps: [], metrics: [], stragglers: [], slowHosts: [], columns: {} };
    this.metric = "";
    this.row = 24;
    this.order = /** @type {number[]} */ ([]);
    this.stragglers = /** @type {Map<number, string>} */ (new Map());
    this.slowHosts = /** @type {Map<number, string>} */ (new Map());
    this.byHost = /** @type {number[][]} */ ([]);
    this.open = /** @type {Set<number>} */ (new Set()); // hosts whose ranks are shown
    this.folded = false;
    this.hostColumn = 0; // how wide the column of hosts is
    this.hostValues = /** @type {HeatValues} */ ({});
    this.hostTypical = /** @type {HeatValues} */ ({});
    this.values = /** @type {HeatValues} */ ({});
    this.typical = /** @type {HeatValues} */ ({});
    this.scale = { low: 0, high: 1, cut: false, most: 1 };
    this.buttons.forEach((button) => button.addEventListener("click", () => this.choose(button.dataset.metric ?? "")));
    this.sorting.addEventListener("change", () => this.sort());
    this.scroller.addEventListener("scroll", () => this.draw(), { passive: true });
    this.canvas.addEventListener("click", (event) => this.pick(event));
    this.strip.addEventListener("click", (event) => this.goTo(event));
  }

  load(/** @type {HeatData} */ data) {
    this.data = data;
    this.stragglers = new Map(data.stragglers);
    this.values = heatValues(data.columns);
    const [ranks, steps] = [data.ranks.length, data.steps.length];
    this.typical = Object.fromEntries(Object.entries(this.values).map(([name, values]) => [name, medians(values, ranks, steps)]));
    this.row = ranks <= 24 ? 24 : ranks <= 64 ? 18 : 15;
    this.folded = ranks * this.row > ROOM - HEAD;
    this.loadHosts(data, steps);
    if (this.byHost.length) this.sorting.value = this.folded ? "slowest-host" : "host";
    else this.sorting.value = this.folded ? "value" : "rank";
    this.choose(data.metrics[0][0]);
  }

  /** @param {HeatData} data @param {number} steps */
  loadHosts(data, steps) {
    this.slowHosts = new Map(data.slowHosts);
    this.byHost = placesByHost(data.host, data.hosts.length);
    const entries = Object.entries(this.values).map(([name, values]) => /** @type {const} */ ([name, hostValues(name, values, this.byHost, steps)]));
    this.hostValues = Object.fromEntries(entries);
    this.hostTypical = Object.fromEntries(entries.map(([name, values]) => [name, medians(values, this.byHost.length, steps)]));
    const wide = data.hosts.map((host, i) => Math.max(host.length * HOST.letter, data.places[i].length * HOST.small));
    const widest = wide.reduce((most, one) => Math.max(most, one), HOST.least);
    this.hostColumn = this.byHost.length ? Math.min(HOST.most, widest) : 0;
  }

  get groupsHosts() { return this.byHost.length > 0 && ["host", "slowest-host"].includes(this.sorting.value); }

  choose(/** @type {string} */ metric) {
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
    if (this.groupsHosts) {
      const { folded, open } = this;
      this.order = rowsByHost(this.byHost, { folded, open, worth: this.sorting.value === "host" ? undefined : this.hostWorth() });
      this.draw();
      return;
    }
    this.order = this.data.ranks.map((_, place) => place);
    if (this.sorting.value === "value") this.order.sort((a, b) => (typical[b] || 0) - (typical[a] || 0) || a - b);
    this.draw();
  }

  /** The slowest host has the most of this; for waits, the least. */
  hostWorth() {
    const typical = this.hostTypical[this.metric];
    return standsFor(this.metric) === "smallest" ? typical.map((value) => -value) : typical;
  }

  measure() {
    const total = this.order.length * this.row + HEAD;
    const height = Math.min(ROOM, total);
    const narrow = this.root.clientWidth < 700;
    const named = this.groupsHosts && !narrow ? this.hostColumn : 0;
    const gutter = narrow ? 92 : this.folded && named ? Math.max(GUTTER, named + 44) : GUTTER + Math.max(0, named - 40);
    const side = narrow ? 110 : SIDE;
    const steps = this.data.steps.length;
    const room = Math.max(60, this.scroller.clientWidth - gutter - side);
    const cell = Math.min(WIDEST_CELL, room / Math.max(steps, 1));
    this.scroller.style.height = `${height}px`;
    this.space.style.height = `${total}px`;
    return { width: this.scroller.clientWidth, height, gutter, named, cell, end: gutter + cell * steps, side, scrolls: total > height };
  }

  /** @override */
  drawNow() {
    if (!this.metric) return;
    this.layout = this.measure();
    const { width, height } = this.layout;
    const ctx = startDrawing(this.canvas, width, height);
    const colors = getColors();
    const top = this.scroller.scrollTop;
    const first = Math.floor(top / this.row);
    const last = Math.min(this.order.length, Math.ceil((top + height) / this.row) + 1);
    for (let row = first; row < last; row++) this.drawRow(ctx, colors, this.order[row], HEAD + row * this.row - top);
    if (this.groupsHosts) this.drawHosts(ctx, colors, first, last, top);
    this.drawHead(ctx, colors);
    this.drawHover(ctx, colors, top);
    this.strip.hidden = !this.layout.scrolls;
    if (this.layout.scrolls) this.drawStrip(colors, first, last);
  }

  /** Where things lie; drawn at least once before anybody points at anything. */
  get placed() { return /** @type {ReturnType<HeatMap["measure"]>} */ (this.layout); }

  /** A row of the map: a rank's, or a host's. @param {number} place */
  rowOf(place) {
    const host = place < 0 ? hostRow(place) : -1;
    if (host < 0) {
      const rank = this.data.ranks[place];
      return { host, index: place, values: this.values, typical: this.typical, cause: this.stragglers.get(rank), name: `rank ${rank}` };
    }
    const arrow = this.open.has(host) ? "▾" : "▸";
    const slow = this.byHost[host].map((one) => this.data.ranks[one]).find((rank) => this.stragglers.has(rank));
    const cause = this.slowHosts.get(host) ?? (slow === undefined ? undefined : `rank ${slow}: ${this.stragglers.get(slow)}`);
    return { host, index: host, values: this.hostValues, typical: this.hostTypical, cause, name: `${arrow} ${this.data.hosts[host]}` };
  }

  /** The host of a row. @param {number} place */
  hostAt(place) { return place < 0 ? hostRow(place) : this.data.host[place]; }

  /** A line between hosts, and each host's name beside its first row. @param {Ctx} ctx @param {Colors} colors @param {number} first @param {number} last @param {number} top */
  drawHosts(ctx, colors, first, last, top) {
    const { width, named } = this.placed;
    for (let row = first; row < last; row++) {
      const host = this.hostAt(this.order[row]);
      const opens = row === 0 || this.hostAt(this.order[row - 1]) !== host;
      const y = HEAD + row * this.row - top;
      if (opens && row) strokeLine(ctx, colors.strong, 1, [[0, y - 0.5], [width, y - 0.5]]);
      if (!named || this.folded || !(opens || row === first)) continue;
      ctx.font = `600 12px ${colors.font}`;
      const color = this.slowHosts.has(host) ? colors.high : colors.text;
      writeText(ctx, color, fitText(ctx, this.data.hosts[host], named), HOST.left, y + this.row / 2 + 0.5);
      const where = this.data.places[host];
      const beside = row + 1 < last && this.hostAt(this.order[row + 1]) === host;
      ctx.font = `11px ${colors.font}`;
      if (where && beside) writeText(ctx, colors.muted, fitText(ctx, where, named), HOST.left, y + 1.5 * this.row + 0.5);
    }
  }

  /** @param {Ctx} ctx @param {Colors} colors @param {number} place @param {number} y */
  drawRow(ctx, colors, place, y) {
    const { gutter, cell, end, side } = this.placed;
    const { host, index, typical, cause, name } = this.rowOf(place);
    ctx.font = `${cause || host >= 0 ? "600 " : ""}12px ${colors.font}`;
    const color = cause && colors.high;
    const middle = y + this.row / 2;
    if (host >= 0) writeText(ctx, color ?? colors.text, fitText(ctx, name, gutter - 16), HOST.left, middle + 0.5);
    else writeText(ctx, color ?? colors.text, name, gutter - 12, middle + 0.5, "right");
    ctx.font = `12px ${colors.font}`;
    if (color) fillBox(ctx, color, 0, y + 1, 4, this.row - 2);
    this.drawCells(ctx, colors, place, y);
    const value = typical[this.metric][index];
    const length = value > 0 ? (Math.max(20, side - 190) * value) / (this.scale.most || 1) : 0;
    if (length) fillBox(ctx, color ?? colors.strong, end + 18, middle - 4, Math.max(1, length), 8);
    const of = host >= 0 && side > 200 && !cause ? `, ${standsFor(this.metric)} of ${counted(this.byHost[host].length, "rank")}` : "";
    const words = Number.isNaN(value) ? "not recorded" : `${duration(value)}${of}`;
    const said = cell && cause && side > 200 ? `${words}  ${cause}` : words;
    writeText(ctx, color ?? colors.muted, said, end + 26 + length, middle + 0.5);
  }

  /** Where steps are narrower than a pixel the slowest of them gives it its colour. @param {Ctx} ctx @param {Colors} colors @param {number} place @param {number} y */
  drawCells(ctx, colors, place, y) {
    const { gutter, cell } = this.placed;
    const steps = this.data.steps.length;
    const { index, values } = this.rowOf(place);
    const group = Math.max(1, Math.ceil(1 / cell));
    const gap = cell > 8 ? 1 : 0;
    for (let step = 0; step < steps; step += group) {
      const value = largest(values[this.metric], index * steps + step, index * steps + Math.min(steps, step + group));
      const x = gutter + step * cell;
      const width = Math.max(cell * group - gap, 1);
      const shade = Number.isNaN(value) ? null : colors.heat[this.shade(value)];
      fillBox(ctx, shade?.color ?? hatchIn(ctx, colors.strong), x, y, width, this.row - 1);
      if (!shade || cell < 56 || this.row < 18) continue;
      ctx.font = `11.5px ${colors.font}`;
      writeText(ctx, shade.ink, duration(value), x + width / 2, y + this.row / 2 + 0.5, "center");
    }
  }

  shade(/** @type {number} */ value) {
    const { low, high } = this.scale;
    const share = Math.min(1, Math.max(0, (value - low) / (high - low || 1)));
    return Math.round(share * (HEATS - 1));
  }

  /** @param {Ctx} ctx @param {Colors} colors */
  drawHead(ctx, colors) {
    const { width, gutter, cell, end, side } = this.placed;
    fillBox(ctx, colors.back, 0, 0, width, HEAD - 2);
    ctx.font = `11px ${colors.font}`;
    const every = Math.max(1, Math.ceil(46 / cell));
    this.data.steps.forEach((number, i) => {
      if (i % every) return;
      const text = cell > 56 ? `step ${number}` : String(number);
      writeText(ctx, colors.muted, text, gutter + i * cell + Math.min(cell, 60) / 2, HEAD / 2, "center");
    });
    if (cell <= 56) writeText(ctx, colors.muted, "step", gutter - 12, HEAD / 2, "right");
    writeText(ctx, colors.muted, side > 200 ? "median of its steps" : "median", end + 18, HEAD / 2);
  }

  /** @param {Ctx} ctx @param {Colors} colors @param {number} top */
  drawHover(ctx, colors, top) {
    if (this.hover < 0) return;
    const { width, gutter, cell } = this.placed;
    const { row, step } = this.cellOf(this.hover);
    const [x, length] = step < 0 ? [0.75, width - 1.5] : [gutter + step * cell, Math.max(cell - 1, 2)];
    strokeBox(ctx, colors.text, 1.5, x, HEAD + row * this.row - top, length, this.row - 1);
  }

  /** All ranks at once, by number, to reach a rank when the rows have to scroll. @param {Colors} colors @param {number} first @param {number} last rows in sight */
  drawStrip(colors, first, last) {
    const width = this.placed.width - GUTTER - STRIP.margin;
    const { ranks } = this.data;
    const ctx = startDrawing(this.strip, this.placed.width, STRIP.height);
    writeText(ctx, colors.muted, "all ranks", GUTTER - 12, 20, "right");
    const typical = this.typical[this.metric];
    const size = width / ranks.length;
    for (let x = 0; x < width; x += Math.max(1, size)) {
      const from = Math.floor(x / size);
      const value = largest(typical, from, Math.min(ranks.length, Math.max(Math.floor((x + 1) / size), from + 1)));
      if (!Number.isNaN(value)) fillBox(ctx, colors.heat[this.shade(value)].color, GUTTER + x, 8, Math.max(1, size) + 0.3, 24);
    }
    const inSight = new Set(this.order.slice(first, last).flatMap((place) => (place < 0 ? this.byHost[hostRow(place)] : [place])));
    ranks.forEach((rank, place) => {
      const x = GUTTER + (place + 0.5) * size;
      if (inSight.has(place)) fillBox(ctx, colors.accent, x - Math.max(size, 1) / 2, 34, Math.max(size, 1), 2.5);
      if (this.stragglers.has(rank)) fillShape(ctx, colors.high, [[x, 8], [x - 5, 0], [x + 5, 0]]);
    });
    writeText(ctx, colors.muted, `rank ${ranks[0]}`, GUTTER, 46);
    writeText(ctx, colors.muted, `rank ${ranks[ranks.length - 1]}`, GUTTER + width, 46, "right");
  }

  goTo(/** @type {MouseEvent} */ { offsetX }) {
    const width = this.placed.width - GUTTER - STRIP.margin;
    const place = Math.floor(((offsetX - GUTTER) / width) * this.data.ranks.length);
    if (place < 0 || place >= this.data.ranks.length) return;
    if (this.groupsHosts && this.folded) this.open.add(this.data.host[place]);
    this.sort();
    const row = this.order.indexOf(place);
    this.space.style.height = `${this.order.length * this.row + HEAD}px`;
    this.scroller.scrollTop = row * this.row - this.placed.height / 2;
    this.setHover(row * (this.data.steps.length + 1));
  }

  /** @override @param {MouseEvent} pointer */
  eventAt({ offsetX, offsetY }) {
    if (!this.layout) return -1;
    const { gutter, cell, end } = this.layout;
    const row = Math.floor((offsetY - HEAD + this.scroller.scrollTop) / this.row);
    if (offsetY < HEAD || row < 0 || row >= this.order.length) return -1;
    const inside = offsetX >= gutter && offsetX < end;
    return row * (this.data.steps.length + 1) + (inside ? 1 + Math.floor((offsetX - gutter) / cell) : 0);
  }

  /** Where a cell is drawn, its rank's place and its step. @param {number} cell */
  cellOf(cell) {
    const width = this.data.steps.length + 1;
    const row = Math.floor(cell / width);
    return { row, place: this.order[row], step: (cell % width) - 1 };
  }

  pick(/** @type {MouseEvent} */ event) {
    const cell = this.eventAt(event);
    if (cell < 0) return;
    const { place } = this.cellOf(cell);
    if (place < 0) this.toggle(hostRow(place));
    else this.onPick(this.data.ranks[place]);
  }

  /** Show the ranks of a host, or no longer. */
  toggle(/** @type {number} */ host) {
    if (!this.open.delete(host)) this.open.add(host);
    this.sort();
  }

  /** @override @param {number} cell */
  tipText(cell) {
    const { data } = this;
    const { place, step } = this.cellOf(cell);
    const { host, index, values, typical, cause } = this.rowOf(place);
    const lines = data.metrics.map(([id, label]) => {
      const ns = step >= 0 ? values[id][index * data.steps.length + step] : typical[id][index];
      const of = host >= 0 ? `, ${standsFor(id)} of its ranks` : "";
      return `${label}${of}: ${Number.isNaN(ns) ? "not recorded" : exactMilliseconds(ns)}`;
    });
    if (step < 0) lines.unshift("median of its steps");
    if (cause) lines.push(`holds the others back: ${cause}`);
    if (host >= 0) lines.push(`click to ${this.open.has(host) ? "hide" : "show"} its ranks`);
    return [`${this.titleOf(place, host)}${step >= 0 ? ` · step ${data.steps[step]}` : ""}`, ...lines];
  }

  /** @param {number} place @param {number} host -1 for a rank's row */
  titleOf(place, host) {
    const { ranks, hosts, places } = this.data;
    const at = this.hostAt(place);
    const where = at >= 0 && places[at] ? ` · ${places[at]}` : "";
    if (host >= 0) return `${hosts[host]} · ranks ${rangeWords(this.byHost[host].map((one) => ranks[one]))}${where}`;
    return `Rank ${ranks[place]}${at >= 0 ? ` · ${hosts[at]}` : ""}${where}`;
  }
}
