// A chart on a canvas, with a tip about what is under the pointer.

import { oncePerFrame } from "./canvas.js";
import { fillTip, partIn, placeTip } from "./dom.js";

/** A chart fills in `drawNow`, `eventAt` and `tipText`. What it draws has numbers; -1 is none. */
export class HoverChart {
  /** @param {HTMLElement} root @param {HTMLCanvasElement} canvas */
  constructor(root, canvas) {
    this.root = root;
    this.canvas = canvas;
    this.tip = partIn(root, ".tip");
    this.hover = -1;
    this.draw = oncePerFrame(() => this.drawNow());
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerleave", () => this.setHover(-1));
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(root);
  }

  drawNow() {}

  resize() { this.draw(); }

  eventAt(/** @type {MouseEvent} */ _pointer) { return -1; }

  /** A title and lines under it. @param {number} _event @returns {string[]} */
  tipText(_event) { return []; }

  move(/** @type {PointerEvent} */ event) { this.setHover(this.eventAt(event), event); }

  /** @param {number} event @param {MouseEvent} [pointer] */
  setHover(event, pointer) {
    const changed = event !== this.hover;
    this.hover = event;
    this.canvas.classList.toggle("is-over", event >= 0);
    if (event < 0) this.tip.hidden = true;
    else if (pointer) {
      fillTip(this.tip, this.tipText(event));
      placeTip(this.tip, pointer);
    }
    if (changed) this.draw();
  }
}
