// The strip above the timeline: the whole trace at once, with a window on what is in view.

import { fillBox, startDrawing, strokeBox } from "./canvas.js";
import { FIRST_CAUSE, getColors, KINDS } from "./palette.js";

const HEIGHT = 46;

/** Share of each pixel's time that each class fills: device work and idle, or the host's top rows. @param {Scene} scene @param {number} count */
export function fillBins(scene, count) {
  const bins = Array.from({ length: count }, () => new Float32Array(KINDS.length));
  const size = scene.span / count;
  const hasDevice = scene.lanes.some((lane) => lane.work);
  const lanes = hasDevice ? scene.lanes.filter((lane) => lane.work || lane.idle) : scene.lanes;
  const rows = lanes.flatMap((lane) =>
    Array.from({ length: hasDevice ? lane.rows : 1 }, (_, depth) => lane.first_row + depth));
  for (const row of rows) {
    for (let i = scene.rowStart[row]; i < scene.rowStart[row + 1]; i++) {
      const [from, to] = [Math.max(scene.start[i], 0), Math.min(scene.end(i), scene.span)];
      const last = Math.min(count - 1, Math.floor(to / size));
      for (let bin = Math.max(0, Math.floor(from / size)); bin <= last; bin++) {
        const part = Math.min(to, (bin + 1) * size) - Math.max(from, bin * size);
        if (part > 0) bins[bin][scene.kind[i]] += part / size;
      }
    }
  }
  return bins;
}

export class Overview {
  /** @param {HTMLCanvasElement} canvas @param {(from: number, to: number) => void} onView */
  constructor(canvas, onView) {
    this.canvas = canvas;
    this.onView = onView;
    this.back = document.createElement("canvas");
    this.painted = ""; // what the back was painted for
    this.width = 0;
    this.view = { t0: 0, t1: 0 };
    this.scene = /** @type {Scene | null} */ (null);
    /** What the pointer holds: the window, at this distance from its left end, or a new one that begins here. @type {{ shift: number } | { from: number } | null} */
    this.grab = null;
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", () => { this.grab = null; });
  }

  /** @param {Scene} scene @param {number} width @param {View} view */
  paint(scene, width, view) {
    const painted = `${width}|${window.devicePixelRatio}|${document.documentElement.dataset.theme}`;
    if (this.scene !== scene || this.painted !== painted) {
      Object.assign(this, { scene, painted, width });
      this.paintBack(scene);
    }
    this.view = view;
    const ctx = startDrawing(this.canvas, width, HEIGHT);
    const colors = getColors();
    ctx.drawImage(this.back, 0, 0, width, HEIGHT);
    const [x0, x1] = [view.t0, view.t1].map((time) => (time / scene.span) * width);
    fillBox(ctx, colors.dim, 0, 0, Math.max(x0, 0), HEIGHT);
    fillBox(ctx, colors.dim, x1, 0, Math.max(width - x1, 0), HEIGHT);
    const left = Math.max(x0, 0.75);
    strokeBox(ctx, colors.accent, 1.5, left, 0.75, Math.max(Math.min(x1, width - 0.75) - left, 2), HEIGHT - 1.5);
  }

  paintBack(/** @type {Scene} */ scene) {
    const { width } = this;
    const ctx = startDrawing(this.back, width, HEIGHT);
    const colors = getColors();
    fillBins(scene, Math.max(1, Math.floor(width))).forEach((shares, x) => {
      let y = HEIGHT;
      const sum = shares.reduce((a, b) => a + b, 0);
      const scale = (HEIGHT - 8) / Math.max(1, sum);
      shares.forEach((share, kind) => {
        if (!share) return;
        fillBox(ctx, (kind >= FIRST_CAUSE ? colors.faint : colors.solid)[kind], x, y - share * scale, 1, share * scale);
        y -= share * scale;
      });
    });
    for (const [, start] of scene.steps) fillBox(ctx, colors.strong, Math.round((start / scene.span) * width), 0, 1, HEIGHT);
  }

  down(/** @type {PointerEvent} */ event) {
    if (!this.scene) return;
    this.canvas.setPointerCapture(event.pointerId);
    const time = (event.offsetX / this.width) * this.scene.span;
    const inside = time >= this.view.t0 && time <= this.view.t1;
    const whole = this.view.t1 - this.view.t0 > this.scene.span * 0.98;
    this.grab = inside && !whole ? { shift: time - this.view.t0 } : { from: time };
  }

  move(/** @type {PointerEvent} */ event) {
    if (!this.grab || !this.scene) return;
    const time = (event.offsetX / this.width) * this.scene.span;
    if ("shift" in this.grab) {
      const start = time - this.grab.shift;
      this.onView(start, start + this.view.t1 - this.view.t0);
    } else this.onView(Math.min(this.grab.from, time), Math.max(this.grab.from, time));
  }
}
