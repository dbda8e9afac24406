// What charts with a time axis share: what is in view, the wheel, dragging, the ruler.

import { canvasIn, partIn, partsIn } from "./dom.js";
import { HoverChart } from "./hover_chart.js";
import { paintRuler } from "./ruler.js";

const SHORTEST_VIEW_NS = 20;
const WIDEST_VIEW = 1.02; // of the whole span, so that the first and last events show their ends
const SCROLL_GUARD_MS = 350; // a page scroll that passes over the canvas must not become a zoom

/** @template {{ span: number, steps: StepMark[] }} S */
export class TimeView extends HoverChart {
  /** @param {HTMLElement} root @param {string} name its parts' classes begin with it @param {number} stepMargin around a step that is shown, of its length */
  constructor(root, name, stepMargin) {
    super(root, canvasIn(root, `.${name}-canvas`));
    this.scroller = partIn(root, `.${name}-scroll`);
    this.ruler = canvasIn(root, `.${name}-ruler`);
    this.gutter = partIn(root, `.${name}-labels`);
    this.stepMargin = stepMargin;
    this.width = 1;
    this.selected = -1;
    this.lastPageScroll = -Infinity;
    this.view = { t0: 0, t1: 1 };
    this.drag = /** @type {{ x: number, y: number, view: View, top: number, moved: boolean } | null} */ (null);
    this.scene = /** @type {S | null} */ (null);
    const { canvas } = this;
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    window.addEventListener("scroll", () => { this.lastPageScroll = performance.now(); }, { passive: true });
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointerup", (event) => this.up(event));
    canvas.addEventListener("dblclick", (event) => this.fit(this.eventAt(event)));
    this.ruler.addEventListener("click", (event) => this.showStepAt(event.offsetX));
    partsIn(root, "[data-act]").forEach((button) =>
      button.addEventListener("click", () => this.act(button.dataset.act ?? "")));
  }

  /** The scene, where there is one. */
  get drawn() { return /** @type {S} */ (this.scene); }

  /** Whole length of the time axis; 0 before anything is loaded. */
  get span() { return this.scene?.span ?? 0; }

  /** What the gutter leaves of the width. */
  measureWidth() {
    const room = /** @type {HTMLElement} */ (this.canvas.parentElement).clientWidth;
    this.width = Math.max(50, room - this.gutter.offsetWidth);
    return this.width;
  }

  drawRuler() { paintRuler(this.ruler, this.drawn.steps, this.view, this.width); }

  /** @param {number} _event */
  fit(_event) {}

  select(/** @type {number} */ event) {
    this.selected = event;
    this.draw();
  }

  /** What the buttons do. @returns {Record<string, () => void>} */
  acts() { return { in: () => this.zoom(1 / 1.6), out: () => this.zoom(1.6), reset: () => this.reset() }; }

  /** What the letters do. @returns {Record<string, () => void>} */
  letters() {
    return {
      w: () => this.zoom(1 / 1.35), s: () => this.zoom(1.35),
      a: () => this.pan(-0.18), d: () => this.pan(0.18),
      f: () => this.fit(this.selected), 0: () => this.reset(),
    };
  }

  act(/** @type {string} */ name) {
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

  /** @param {number} t0 @param {number} t1 @param {number} margin on each side, of the length */
  showAround(t0, t1, margin) { this.show(t0 - (t1 - t0) * margin, t1 + (t1 - t0) * margin); }

  showStepAt(/** @type {number} */ x) {
    const time = this.view.t0 + (x / this.width) * (this.view.t1 - this.view.t0);
    const step = this.scene?.steps.find(([, start, dur]) => time >= start && time < start + dur);
    if (step) this.showAround(step[1], step[1] + step[2], this.stepMargin);
  }

  /** @param {number} factor @param {number} at share of the width that keeps its time */
  zoom(factor, at = 0.5) {
    const { t0, t1 } = this.view;
    const pivot = t0 + (t1 - t0) * at;
    const length = Math.min(Math.max((t1 - t0) * factor, SHORTEST_VIEW_NS), this.span * WIDEST_VIEW);
    this.show(pivot - length * at, pivot + length * (1 - at));
  }

  /** @param {number} share of what was in view @param {View} from */
  pan(share, { t0, t1 } = this.view) {
    const by = (t1 - t0) * share;
    this.show(t0 + by, t1 + by);
  }

  /** There is nothing to zoom out to: the page scrolls instead. */
  get isWidest() { return this.view.t1 - this.view.t0 >= this.span * WIDEST_VIEW * (1 - 1e-9); }

  wheel(/** @type {WheelEvent} */ event) {
    if (!this.span) return;
    const now = performance.now();
    if (now - this.lastPageScroll < SCROLL_GUARD_MS && !event.ctrlKey) {
      this.lastPageScroll = now;
      return;
    }
    if (this.isWidest && event.deltaY > 0 && event.deltaY >= Math.abs(event.deltaX) && !event.shiftKey && !event.ctrlKey) return;
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

  down(/** @type {PointerEvent} */ event) {
    if (event.button !== 0 || !this.span) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.drag = { x: event.clientX, y: event.clientY, view: this.view, top: this.scroller.scrollTop, moved: false };
    this.scroller.focus({ preventScroll: true });
  }

  /** @override @param {PointerEvent} event */
  move(event) {
    if (!this.span) return;
    const { drag } = this;
    if (!drag) {
      super.move(event);
      return;
    }
    const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
    if (!drag.moved && Math.hypot(dx, dy) < 4) return;
    drag.moved = true;
    this.canvas.classList.add("is-dragging");
    this.setHover(-1);
    this.scroller.scrollTop = drag.top - dy;
    this.pan(-dx / this.width, drag.view);
  }

  up(/** @type {PointerEvent} */ event) {
    const { drag } = this;
    this.drag = null;
    this.canvas.classList.remove("is-dragging");
    if (drag && !drag.moved) this.select(this.eventAt(event));
  }
}
