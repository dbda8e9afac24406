// What charts with a time axis share: what is in view, the wheel, dragging, one drawing per frame.

import { oncePerFrame } from "./canvas.js";
import { partIn, partsIn, placeTip } from "./dom.js";

/** @typedef {{ t0: number, t1: number }} View */
/** @typedef {import("./payload.js").StepMark} StepMark */
/** @typedef {{ x: number, y: number, view: View, top: number, moved: boolean }} Drag */

export const SHORTEST_VIEW_NS = 20;
const WIDEST_VIEW = 1.02; // of the whole span, so that the first and last events show their ends
const SCROLL_GUARD_MS = 350; // a page scroll that passes over the canvas must not become a zoom

/**
 * A chart names its canvas and scroller and fills in `span`, `width`, `steps`, `drawNow`, `eventAt`,
 * `fillTip` and `select`. An event is a number, -1 is none.
 */
export class TimeView {
  /** @param {HTMLElement} root @param {HTMLCanvasElement} canvas @param {HTMLElement} scroller */
  constructor(root, canvas, scroller) {
    this.root = root;
    this.canvas = canvas;
    this.scroller = scroller;
    this.tip = partIn(root, ".tip");
    this.hover = -1;
    this.selected = -1;
    this.lastPageScroll = -Infinity;
    /** @type {View} */
    this.view = { t0: 0, t1: 1 };
    /** @type {Drag | null} */
    this.drag = null;
    this.draw = oncePerFrame(() => this.drawNow());
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    window.addEventListener("scroll", () => { this.lastPageScroll = performance.now(); }, { passive: true });
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.up(event));
    canvas.addEventListener("pointerleave", () => this.setHover(-1));
    canvas.addEventListener("dblclick", (event) => this.fit(this.eventAt(event)));
    partsIn(root, "[data-act]").forEach((button) =>
      button.addEventListener("click", () => this.act(button.dataset.act ?? "")));
  }

  /** Whole length of the time axis; 0 before anything is loaded. */
  get span() {
    return 0;
  }

  /** Width of the canvas. */
  get width() {
    return 1;
  }

  /** @returns {StepMark[]} */
  get steps() {
    return [];
  }

  drawNow() {}

  /** @param {MouseEvent} _pointer @returns {number} */
  eventAt(_pointer) {
    return -1;
  }

  /** @param {number} _event */
  fillTip(_event) {}

  /** @param {number} _event */
  fit(_event) {}

  /** @param {number} event */
  select(event) {
    this.selected = event;
    this.draw();
  }

  /** What the buttons do. @returns {Record<string, () => void>} */
  acts() {
    return { in: () => this.zoom(1 / 1.6), out: () => this.zoom(1.6), reset: () => this.reset() };
  }

  /** What the letters do. @returns {Record<string, () => void>} */
  letters() {
    return {
      w: () => this.zoom(1 / 1.35), s: () => this.zoom(1.35),
      a: () => this.pan(-0.18), d: () => this.pan(0.18),
      f: () => this.fit(this.selected), 0: () => this.reset(),
    };
  }

  /** @param {string} name */
  act(name) {
    if (this.span) this.acts()[name]();
  }

  reset() {
    const margin = (this.span * (WIDEST_VIEW - 1)) / 2;
    this.show(-margin, this.span + margin);
  }

  /** @param {number} t0 @param {number} t1 */
  show(t0, t1) {
    const length = Math.min(Math.max(t1 - t0, SHORTEST_VIEW_NS), this.span * WIDEST_VIEW);
    const margin = length * 0.05;
    const from = Math.min(Math.max((t0 + t1 - length) / 2, -margin), this.span + margin - length);
    this.view = { t0: from, t1: from + length };
    this.draw();
  }

  /** @param {number} x @param {number} margin of the step's length */
  showStepAt(x, margin) {
    const time = this.view.t0 + (x / this.width) * (this.view.t1 - this.view.t0);
    const step = this.steps.find(([, start, dur]) => time >= start && time < start + dur);
    if (step) this.show(step[1] - step[2] * margin, step[1] + step[2] * (1 + margin));
  }

  /** @param {number} factor @param {number} at share of the width that keeps its time */
  zoom(factor, at = 0.5) {
    const { t0, t1 } = this.view;
    const pivot = t0 + (t1 - t0) * at;
    const length = Math.min(Math.max((t1 - t0) * factor, SHORTEST_VIEW_NS), this.span * WIDEST_VIEW);
    this.show(pivot - length * at, pivot + length * (1 - at));
  }

  /** @param {number} share of what is in view */
  pan(share) {
    const by = (this.view.t1 - this.view.t0) * share;
    this.show(this.view.t0 + by, this.view.t1 + by);
  }

  /** @param {WheelEvent} event */
  wheel(event) {
    if (!this.span) return;
    const now = performance.now();
    if (now - this.lastPageScroll < SCROLL_GUARD_MS && !event.ctrlKey) {
      this.lastPageScroll = now;
      return;
    }
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 30 : 1;
    if (event.shiftKey) {
      this.scroller.scrollTop += (event.deltaY || event.deltaX) * unit;
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      this.pan((event.deltaX * unit) / this.width);
    } else {
      const power = Math.max(-240, Math.min(240, event.deltaY * unit)) * (event.ctrlKey ? 3 : 1);
      this.zoom(Math.exp(power * 0.0022), event.offsetX / this.width);
    }
  }

  /** @param {PointerEvent} event */
  down(event) {
    if (event.button !== 0 || !this.span) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.drag = { x: event.clientX, y: event.clientY, view: this.view, top: this.scroller.scrollTop, moved: false };
    this.scroller.focus({ preventScroll: true });
  }

  /** @param {PointerEvent} event */
  move(event) {
    if (!this.span) return;
    const { drag } = this;
    if (!drag) {
      this.setHover(this.eventAt(event), event);
      return;
    }
    const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
    if (!drag.moved && Math.hypot(dx, dy) < 4) return;
    drag.moved = true;
    this.canvas.classList.add("is-dragging");
    this.setHover(-1);
    const by = (-dx / this.width) * (drag.view.t1 - drag.view.t0);
    this.scroller.scrollTop = drag.top - dy;
    this.show(drag.view.t0 + by, drag.view.t1 + by);
  }

  /** @param {PointerEvent} event */
  up(event) {
    const { drag } = this;
    this.drag = null;
    this.canvas.classList.remove("is-dragging");
    if (drag && !drag.moved) this.select(this.eventAt(event));
  }

  /** @param {number} event @param {MouseEvent} [pointer] */
  setHover(event, pointer) {
    const changed = event !== this.hover;
    this.hover = event;
    this.canvas.classList.toggle("is-over", event >= 0);
    if (event < 0) this.tip.hidden = true;
    else {
      if (changed) this.fillTip(event);
      if (pointer) placeTip(this.tip, pointer);
    }
    if (changed) this.draw();
  }
}
