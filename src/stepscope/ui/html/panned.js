// What pictures with a time axis share: what is in view, the wheel, dragging, one drawing a frame.
// A picture brings `scene.span`, `layout.width`, `drawNow`, `eventAt`, `setHover` and `select`.

const SHORTEST_VIEW_NS = 20;
const WIDEST_VIEW = 1.02; // of the whole span, so that the first and last events show their ends
const SCROLL_GUARD_MS = 350; // a page scroll that passes over the canvas must not become a zoom

class Panned {
  constructor(canvas, scroller) {
    this.canvas = canvas;
    this.scroller = scroller;
    this.lastPageScroll = -Infinity;
    canvas.addEventListener("wheel", (e) => this.wheel(e), { passive: false });
    window.addEventListener("scroll", () => (this.lastPageScroll = performance.now()), { passive: true });
    canvas.addEventListener("pointerdown", (e) => this.down(e));
    canvas.addEventListener("pointermove", (e) => this.move(e));
    canvas.addEventListener("pointerup", (e) => this.up(e));
    canvas.addEventListener("pointerleave", () => this.setHover(-1));
  }

  reset() {
    const margin = (this.scene.span * (WIDEST_VIEW - 1)) / 2;
    this.show(-margin, this.scene.span + margin);
  }

  show(t0, t1) {
    const { span } = this.scene;
    const length = Math.min(Math.max(t1 - t0, SHORTEST_VIEW_NS), span * WIDEST_VIEW);
    const margin = length * 0.05;
    const from = Math.min(Math.max((t0 + t1 - length) / 2, -margin), span + margin - length);
    this.view = { t0: from, t1: from + length };
    this.draw();
  }

  zoom(factor, at = 0.5) {
    const { t0, t1 } = this.view;
    const pivot = t0 + (t1 - t0) * at;
    const length = Math.min(Math.max((t1 - t0) * factor, SHORTEST_VIEW_NS), this.scene.span * WIDEST_VIEW);
    this.show(pivot - length * at, pivot + length * (1 - at));
  }

  pan(share) {
    const by = (this.view.t1 - this.view.t0) * share;
    this.show(this.view.t0 + by, this.view.t1 + by);
  }

  draw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.drawNow();
    });
  }

  wheel(event) {
    if (!this.scene) return;
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
      this.pan((event.deltaX * unit) / this.layout.width);
    } else {
      const power = Math.max(-240, Math.min(240, event.deltaY * unit)) * (event.ctrlKey ? 3 : 1);
      this.zoom(Math.exp(power * 0.0022), event.offsetX / this.layout.width);
    }
  }

  down(event) {
    if (event.button !== 0 || !this.scene) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.drag = { x: event.clientX, y: event.clientY, view: this.view, top: this.scroller.scrollTop, moved: false };
    this.scroller.focus({ preventScroll: true });
  }

  move(event) {
    if (!this.scene) return;
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
    const by = (-dx / this.layout.width) * (drag.view.t1 - drag.view.t0);
    this.scroller.scrollTop = drag.top - dy;
    this.show(drag.view.t0 + by, drag.view.t1 + by);
  }

  up(event) {
    const { drag } = this;
    this.drag = null;
    this.canvas.classList.remove("is-dragging");
    if (drag && !drag.moved) this.select(this.eventAt(event));
  }
}
