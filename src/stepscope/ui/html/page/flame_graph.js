// A flame graph that hangs from the top: width is time, depth is the call stack.

import { fillBox, fitText, startDrawing, strokeBox, writeText } from "./canvas.js";
import { canvasIn, inputIn, partIn } from "./dom.js";
import { count, duration, percent, shortName } from "./format.js";
import { HoverChart } from "./hover_chart.js";
import { fillIndex, getColors, LEVELS, VARIANTS } from "./palette.js";

const FLAME_ROW = 18;

export class FlameTree {
  /** @param {Columns} columns @param {string} side host or device @param {string[]} strings */
  constructor(columns, side, strings) {
    this.strings = strings;
    this.parent = Int32Array.from(columns[`${side}_parent`], (parent) => parent - 1);
    this.name = columns[`${side}_name`];
    this.kind = columns[`${side}_kind`];
    this.count = columns[`${side}_count`];
    this.total = columns[`${side}_total`];
    this.self = columns[`${side}_self`];
    this.size = this.parent.length;
    this.depth = new Uint16Array(this.size);
    this.x = new Float64Array(this.size);
    this.whole = 0;
    this.order = this.layOut();
  }

  /** Parents come before their children, so one pass over nodes by width places them all. */
  layOut() {
    const { size, parent, total } = this;
    for (let i = 0; i < size; i++) this.depth[i] = parent[i] < 0 ? 0 : this.depth[parent[i]] + 1;
    const order = Array.from({ length: size }, (_, i) => i);
    // Roots keep their order, the main thread first: idle threads are wide and say little.
    order.sort((a, b) => this.depth[a] - this.depth[b] || (this.depth[a] && total[b] - total[a]) || a - b);
    const used = new Float64Array(size);
    for (const i of order) {
      const above = parent[i];
      if (above < 0) {
        this.x[i] = this.whole;
        this.whole += total[i];
      } else {
        this.x[i] = this.x[above] + used[above];
        used[above] += total[i];
      }
    }
    return order;
  }

  /** The next one with the same parent, in the order of their widths; -1 where there is none. @param {number} node @param {1 | -1} way */
  neighbour(node, way) {
    if (node < 0) return -1;
    const beside = this.order.filter((other) => this.parent[other] === this.parent[node]);
    return beside[beside.indexOf(node) + way] ?? -1;
  }

  label(/** @type {number} */ node) { return this.strings[this.name[node]]; }

  /** A mark for each node whose name holds the text. @param {string} text in small letters */
  find(text) {
    const named = this.strings.map((name) => name.toLowerCase().includes(text));
    return Uint8Array.from(this.name, (code) => (named[code] ? 1 : 0));
  }

  /** A match inside a match adds nothing: its time is already counted. @param {Uint8Array} mask */
  timeOf(mask) {
    const inside = new Uint8Array(this.size);
    let sum = 0;
    for (let i = 0; i < this.size; i++) {
      const above = this.parent[i];
      inside[i] = above >= 0 && (inside[above] || mask[above]) ? 1 : 0;
      if (mask[i] && !inside[i]) sum += this.total[i];
    }
    return sum;
  }
}

export class FlameGraph extends HoverChart {
  constructor(/** @type {HTMLElement} */ root) {
    super(root, canvasIn(root, "canvas"));
    this.search = inputIn(root, "input");
    this.matchTime = partIn(root, ".flame-count");
    this.crumb = partIn(root, ".flame-crumb");
    this.resetButton = inputIn(root, "[data-flame-reset]");
    this.zoomed = -1;
    this.tree = /** @type {FlameTree | null} */ (null);
    this.mask = /** @type {Uint8Array | null} */ (null);
    this.shown = /** @type {NodeBox[]} */ ([]);
    this.canvas.addEventListener("click", (event) => this.zoom(this.eventAt(event)));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.resetButton.addEventListener("click", () => this.zoom(-1));
    this.search.addEventListener("input", () => this.runSearch());
  }

  load(/** @type {FlameTree} */ tree) {
    this.tree = tree;
    this.zoomed = this.hover = -1;
    this.runSearch();
    this.zoom(-1);
  }

  /** @param {number} node -1 for all; the node that is zoomed to already, for the one above it */
  zoom(node) {
    const { tree } = this;
    if (!tree) return;
    if (node === this.zoomed && node >= 0) node = tree.parent[node];
    this.zoomed = node;
    this.resetButton.disabled = node < 0;
    this.crumb.textContent = node < 0 ? "" : this.crumbText(tree, node);
    this.draw();
  }

  /** @param {FlameTree} tree @param {number} node */
  crumbText(tree, node) { return `${tree.label(node)} · ${shareWords(tree, tree.total[node])}`; }

  key(/** @type {KeyboardEvent} */ event) {
    const { tree } = this;
    if (!tree) return;
    if (event.key === "Escape" || event.key === "ArrowUp") this.zoom(this.zoomed < 0 ? -1 : tree.parent[this.zoomed]);
    else if (event.key === "ArrowDown" || event.key === "Enter") {
      const child = tree.order.find((node) => tree.parent[node] === this.zoomed);
      if (child !== undefined) this.zoom(child);
    } else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const next = tree.neighbour(this.zoomed, event.key === "ArrowRight" ? 1 : -1);
      if (next >= 0) this.zoom(next);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** Nodes in view; those above the zoomed one span the whole width. @param {FlameTree} tree @param {number} width */
  boxes(tree, width) {
    const [from, length] = this.zoomed < 0 ? [0, tree.whole] : [tree.x[this.zoomed], tree.total[this.zoomed]];
    const scale = width / Math.max(length, 1);
    const boxes = /** @type {NodeBox[]} */ ([]);
    for (const i of tree.order) {
      let x = (tree.x[i] - from) * scale;
      let w = tree.total[i] * scale;
      if (x >= width - 1e-6 || x + w <= 1e-6 || w < 0.4) continue;
      if (x < 0) [x, w] = [0, w + x];
      boxes.push([i, x, Math.min(w, width - x)]);
    }
    return boxes;
  }

  /** @override */
  drawNow() {
    const { tree } = this;
    const width = this.canvas.parentElement?.clientWidth;
    if (!tree?.size || !width) return;
    const colors = getColors();
    this.shown = this.boxes(tree, width);
    const depth = this.shown.reduce((most, [i]) => Math.max(most, tree.depth[i]), 0) + 1;
    const ctx = startDrawing(this.canvas, width, depth * FLAME_ROW + 2);
    for (const box of this.shown) this.drawNode(ctx, colors, tree, box);
    const box = this.shown.find(([i]) => i === this.hover);
    if (box) strokeBox(ctx, colors.text, 1.25, box[1] + 0.5, tree.depth[this.hover] * FLAME_ROW + 0.5, Math.max(box[2] - 1.5, 1), FLAME_ROW - 2);
  }

  /** @param {Ctx} ctx @param {Colors} colors @param {FlameTree} tree @param {NodeBox} box */
  drawNode(ctx, colors, tree, [i, x, width]) {
    const y = tree.depth[i] * FLAME_ROW;
    const above = this.zoomed >= 0 && i !== this.zoomed && tree.depth[i] < tree.depth[this.zoomed];
    const dim = above || (this.mask && !this.mask[i]);
    const { fill, ink } = this.paint(colors, tree, i, Boolean(dim));
    fillBox(ctx, fill, x, y, Math.max(width - 0.6, 0.5), FLAME_ROW - 1.5);
    if (width < 26) return;
    this.write(ctx, ink, tree, i, x + 4, y + FLAME_ROW / 2 - 0.5, width - 8);
  }

  /** The colours of a node: of its kind of event. @param {Colors} colors @param {FlameTree} tree @param {number} i @param {boolean} dim */
  paint(colors, tree, i, dim) {
    const fill = colors.fills[fillIndex(tree.kind[i], tree.name[i] % VARIANTS, dim ? 0 : LEVELS - 1)];
    return { fill, ink: dim ? colors.muted : colors.inks[tree.kind[i]] };
  }

  /** @param {Ctx} ctx @param {string} ink @param {FlameTree} tree @param {number} i @param {number} x @param {number} y @param {number} width */
  write(ctx, ink, tree, i, x, y, width) {
    writeText(ctx, ink, fitText(ctx, shortName(tree.label(i)), width), x, y);
  }

  /** @override @param {MouseEvent} pointer */
  eventAt({ offsetX, offsetY }) {
    const depth = Math.floor(offsetY / FLAME_ROW);
    const hit = this.shown.find(([i, x, width]) =>
      this.tree?.depth[i] === depth && offsetX >= x && offsetX < x + Math.max(width, 1));
    return hit ? hit[0] : -1;
  }

  /** @override @param {number} node */
  tipText(node) {
    const { tree, zoomed } = this;
    if (!tree) return [];
    const times = `${shareWords(tree, tree.total[node])}  ·  self ${duration(tree.self[node])}  ·  ${count(tree.count[node])}×`;
    if (zoomed < 0) return [tree.label(node), times];
    return [tree.label(node), times, `${percent(tree.total[node] / tree.total[zoomed])} of ${shortName(tree.label(zoomed))}`];
  }

  runSearch() {
    const { tree } = this;
    if (!tree) return;
    const text = this.search.value.trim().toLowerCase();
    this.mask = text ? tree.find(text) : null;
    const time = this.mask ? tree.timeOf(this.mask) : 0;
    this.matchTime.textContent = time ? shareWords(tree, time) : this.mask ? "no match" : "";
    this.draw();
  }
}

/** @param {FlameTree} tree @param {number} ns */
const shareWords = (tree, ns) => `${duration(ns)}, ${percent(ns / tree.whole)} of all`;
