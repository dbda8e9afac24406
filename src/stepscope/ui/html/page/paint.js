// Draws what is visible of the timeline. Events narrower than a pixel are merged into one bar whose
// strength shows how full the pixel is; bars are sorted by colour because changing it is what costs.

import { fillBox, fillShape, fitText, hatchIn, startDrawing, strokeBox, writeText } from "./canvas.js";
import { LANE_PAD, ROW } from "./lanes.js";
import { fillIndex, getColors, LEVELS, VARIANTS } from "./palette.js";

const BAR = 15;
const MAX_ARROWS = 48;

class Bars {
  constructor() {
    this.size = 0;
    this.box = new Float32Array(3 * 4096);
    this.fill = new Uint16Array(4096);
    this.labels = /** @type {[string, number, number, string][]} */ ([]);
  }

  grow() {
    const box = new Float32Array(this.box.length * 2);
    const fill = new Uint16Array(this.fill.length * 2);
    box.set(this.box);
    fill.set(this.fill);
    [this.box, this.fill] = [box, fill];
  }

  clear() {
    this.size = 0;
    this.labels.length = 0;
  }

  /** @param {number} x @param {number} y @param {number} width @param {number} fill */
  add(x, y, width, fill) {
    if (this.size === this.fill.length) this.grow();
    const at = this.size * 3;
    this.box[at] = x;
    this.box[at + 1] = y;
    this.box[at + 2] = width;
    this.fill[this.size++] = fill;
  }

  /** @param {Ctx} ctx @param {Colors} colors */
  flush(ctx, colors) {
    const first = new Uint32Array(colors.fills.length + 1);
    for (let i = 0; i < this.size; i++) first[this.fill[i] + 1]++;
    for (let i = 1; i < first.length; i++) first[i] += first[i - 1];
    const next = first.slice();
    const order = new Uint32Array(this.size);
    for (let i = 0; i < this.size; i++) order[next[this.fill[i]]++] = i;
    for (let fill = 0; fill + 1 < first.length; fill++) {
      if (first[fill] === first[fill + 1]) continue;
      ctx.fillStyle = colors.fills[fill];
      for (let k = first[fill]; k < first[fill + 1]; k++) {
        const at = order[k] * 3;
        ctx.fillRect(this.box[at], this.box[at + 1], this.box[at + 2], BAR);
      }
    }
    for (const [text, x, y, ink] of this.labels) writeText(ctx, ink, text, x, y);
  }
}

export class Painter {
  constructor(/** @type {HTMLCanvasElement} */ canvas) {
    this.canvas = canvas;
    this.bars = new Bars();
  }

  /** @param {Scene} scene @param {Layout} layout @param {View} view @param {Marks} marks */
  paint(scene, layout, view, marks) {
    const colors = getColors();
    const ctx = startDrawing(this.canvas, layout.width, layout.height);
    const scale = layout.width / (view.t1 - view.t0);
    const frame = { ctx, colors, scene, layout, view, scale, marks };
    ctx.save();
    ctx.beginPath();
    ctx.rect(0, layout.pinned, layout.width, layout.height - layout.pinned);
    ctx.clip();
    this.paintGroup(frame, layout.lanes.filter((place) => !place.pinned));
    ctx.restore();
    this.paintGroup(frame, layout.lanes.filter((place) => place.pinned));
    if (layout.pinned) fillBox(ctx, colors.strong, 0, layout.pinned - 1, layout.width, 1);
    this.paintSteps(frame);
    this.paintMarks(frame);
  }

  /** @param {TimelineFrame} frame @param {PlacedLane[]} places */
  paintGroup(frame, places) {
    const { ctx, colors, layout, marks } = frame;
    const seen = places.filter((place) => layout.top(place) < layout.height && layout.top(place) + place.height > 0);
    seen.forEach((place) => this.paintLaneBack(frame, place));
    this.paintBars(frame, seen, null);
    seen.filter((place) => place.lane.idle).forEach((place) => this.paintHatch(frame, place));
    if (!marks.mask) return;
    seen.forEach((place) => fillBox(ctx, colors.dim, 0, layout.top(place), layout.width, place.height - 1));
    this.paintBars(frame, seen, marks.mask);
  }

  /** @param {TimelineFrame} frame @param {PlacedLane[]} places @param {Uint8Array | null} mask */
  paintBars(frame, places, mask) {
    this.bars.clear();
    places.forEach((place) => this.collectLane(frame, place, mask));
    this.bars.flush(frame.ctx, frame.colors);
  }

  /** @param {TimelineFrame} frame @param {PlacedLane} place */
  paintLaneBack(frame, place) {
    const { ctx, colors, scene, layout } = frame;
    const [top, height] = [layout.top(place), place.height - 1];
    fillBox(ctx, colors.line, 0, top + height, layout.width, 1);
    if (!place.lane.work || layout.gapRow < 0) return;
    this.fillRow(frame, layout.gapRow, top, height, (i, width) => (width < 0.75 ? null : colors.shade[scene.kind[i]]));
  }

  /** A box for each visible event of a row that gets a colour. @param {TimelineFrame} frame @param {number} row @param {number} y @param {number} height @param {(event: number, width: number) => string | CanvasPattern | null} colorOf */
  fillRow({ ctx, scene, view, scale }, row, y, height, colorOf) {
    const to = scene.rowStart[row + 1];
    for (let i = scene.firstVisible(row, view.t0); i < to && scene.start[i] < view.t1; i++) {
      const width = scene.dur[i] * scale;
      const color = colorOf(i, width);
      if (color) fillBox(ctx, color, (scene.start[i] - view.t0) * scale, y, width, height);
    }
  }

  /** @param {TimelineFrame} frame @param {PlacedLane} place @param {Uint8Array | null} mask */
  collectLane(frame, place, mask) {
    const { layout } = frame;
    const rows = place.lane.folded ? 1 : place.lane.rows;
    for (let depth = 0; depth < rows; depth++) {
      const y = layout.top(place) + LANE_PAD + depth * ROW;
      if (y > layout.height || y + ROW < (place.pinned ? 0 : layout.pinned)) continue;
      this.collectRow(frame, place.lane.first_row + depth, y, mask);
    }
  }

  /** @param {TimelineFrame} frame @param {number} row @param {number} y @param {Uint8Array | null} mask */
  collectRow({ ctx, scene, colors, layout, view, scale }, row, y, mask) {
    const { start, dur, kind, name } = scene;
    const to = scene.rowStart[row + 1];
    const right = layout.width + 2;
    let i = scene.firstVisible(row, view.t0);
    while (i < to && start[i] < view.t1) {
      if (mask && !mask[i]) {
        i++;
        continue;
      }
      const x = (start[i] - view.t0) * scale;
      const width = dur[i] * scale;
      if (width < 1.5) {
        i = this.mergePixel(scene, i, to, Math.floor(x), y, view.t0, scale, mask);
        continue;
      }
      const left = Math.max(x, -2);
      const shown = Math.min(x + width, right) - left;
      const shade = name[i] % VARIANTS;
      this.bars.add(left, y, Math.max(shown - 0.6, 1), fillIndex(kind[i], shade, LEVELS - 1));
      const text = shown > 30 ? fitText(ctx, scene.shortLabel(i), shown - 8) : "";
      if (text) this.bars.labels.push([text, Math.max(left, 0) + 4, y + BAR / 2 + 0.5, colors.inks[kind[i]]]);
      i++;
    }
  }

  /** @param {Scene} scene @param {number} i @param {number} to @param {number} pixel @param {number} y @param {number} t0 @param {number} scale @param {Uint8Array | null} mask */
  mergePixel(scene, i, to, pixel, y, t0, scale, mask) {
    const { start, dur, kind } = scene;
    const until = t0 + (pixel + 1) / scale;
    let full = 0;
    let widest = i;
    let j = i;
    for (; j < to && start[j] < until; j++) {
      if (dur[j] * scale >= 1.5) break;
      if (mask && !mask[j]) continue;
      full += dur[j];
      if (dur[j] > dur[widest]) widest = j;
    }
    const level = Math.min(LEVELS - 1, Math.floor(full * scale * LEVELS));
    this.bars.add(pixel, y, 1, fillIndex(kind[widest], 0, level));
    return Math.max(j, i + 1);
  }

  /** Idle is striped wherever it is drawn, so that it differs from work without relying on hue. @param {TimelineFrame} frame @param {PlacedLane} place */
  paintHatch(frame, place) {
    const hatch = hatchIn(frame.ctx, frame.colors.hatch);
    const y = frame.layout.top(place) + LANE_PAD;
    this.fillRow(frame, place.lane.first_row, y, BAR, (_, width) => (width >= 3 && width < 30 ? hatch : null));
  }

  paintSteps(/** @type {TimelineFrame} */ { ctx, colors, scene, layout, view, scale }) {
    const edges = scene.steps.flatMap(([, start, dur]) => [start, start + dur]);
    for (const time of new Set(edges)) {
      const x = Math.round((time - view.t0) * scale);
      if (x >= 0 && x < layout.width) fillBox(ctx, colors.strong, x, 0, 1, layout.height);
    }
  }

  paintMarks(/** @type {TimelineFrame} */ frame) {
    const { scene, colors, marks } = frame;
    const focus = marks.hover >= 0 ? marks.hover : marks.selected;
    if (marks.selected >= 0) this.outline(frame, marks.selected, colors.accent, 2);
    if (marks.hover >= 0) this.outline(frame, marks.hover, colors.text, 1.25);
    if (focus >= 0 && focus < scene.drawn) this.paintLinks(frame, focus);
  }

  /** @param {TimelineFrame} frame @param {number} event */
  box({ scene, layout, view, scale }, event) {
    const place = layout.placeOf(event);
    const depth = place.lane.folded ? 0 : scene.rowOf(event) - place.lane.first_row;
    const x = (scene.start[event] - view.t0) * scale;
    return { x, y: layout.top(place) + LANE_PAD + depth * ROW, width: Math.max(scene.dur[event] * scale, 1), place };
  }

  /** @param {TimelineFrame} frame @param {number} event @param {string} color @param {number} thick */
  outline(frame, event, color, thick) {
    const { ctx, layout } = frame;
    const { x, y, width, place } = this.box(frame, event);
    if (!place.pinned && y + BAR < layout.pinned) return;
    const left = Math.max(x, -4);
    strokeBox(ctx, color, thick, left - 0.5, y - 0.5, Math.min(x + width, layout.width + 4) - left + 1, BAR + 1);
  }

  /** @param {TimelineFrame} frame @param {number} event */
  paintLinks(frame, event) {
    const { scene, marks, view } = frame;
    if (scene.link[event] >= 0) {
      this.outline(frame, scene.link[event], frame.colors.accent, 1.5);
      this.arrow(frame, scene.link[event], event);
      return;
    }
    const inView = (/** @type {number} */ i) => scene.end(i) > view.t0 && scene.start[i] < view.t1;
    const seen = marks.launched(event).filter((kernel) => inView(kernel) || inView(scene.link[kernel]));
    // A long operator launches thousands: a few dozen arrows, evenly chosen, say enough.
    const every = Math.ceil(seen.length / MAX_ARROWS);
    for (let i = 0; i < seen.length; i += every) this.arrow(frame, scene.link[seen[i]], seen[i]);
  }

  /** @param {TimelineFrame} frame @param {number} from @param {number} to */
  arrow(frame, from, to) {
    const { ctx, colors, layout } = frame;
    const [a, b] = [this.box(frame, from), this.box(frame, to)];
    const [x0, x1] = [a.x + Math.min(a.width, 12) / 2, b.x];
    if (Math.max(x0, x1) < -400 || Math.min(x0, x1) > layout.width + 400) return;
    const up = b.y < a.y;
    const [y0, y1] = [up ? a.y : a.y + BAR, up ? b.y + BAR : b.y];
    const bend = Math.max(24, Math.abs(y1 - y0) / 2) * (up ? -1 : 1);
    ctx.strokeStyle = colors.accent;
    ctx.lineWidth = 1.25;
    ctx.beginPath();
    ctx.moveTo(x0, y0);
    ctx.bezierCurveTo(x0, y0 + bend, x1, y1 - bend, x1, y1 + (up ? 4 : -4));
    ctx.stroke();
    fillShape(ctx, colors.accent, [[x1, y1], [x1 - 3.5, y1 + (up ? 6 : -6)], [x1 + 3.5, y1 + (up ? 6 : -6)]]);
  }
}
