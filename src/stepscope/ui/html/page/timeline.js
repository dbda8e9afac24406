// The timeline: what is in view, hovered, selected and searched for.

import { context } from "./canvas.js";
import { fillDetail, tipLines } from "./detail.js";
import { canvasIn, inputIn, partIn } from "./dom.js";
import { count, duration } from "./format.js";
import { listenToKeys } from "./keys.js";
import { fillGutter, foldMinorLanes, LANE_PAD, placeLanes, ROW } from "./lanes.js";
import { Overview } from "./overview.js";
import { Painter } from "./paint.js";
import { registerPane } from "./registry.js";
import { Scene } from "./scene.js";
import { TimeView } from "./time_view.js";

/** @extends {TimeView<Scene>} */
export class Timeline extends TimeView {
  constructor(/** @type {HTMLElement} */ root) {
    super(root, "tl", 0.01);
    this.detail = partIn(root, ".tl-detail");
    this.search = inputIn(root, ".tl-search");
    this.count = partIn(root, ".tl-count");
    this.painter = new Painter(this.canvas);
    this.overview = new Overview(canvasIn(root, ".tl-overview"), (from, to) => this.show(from, to));
    this.frameMs = 0;
    this.givenHeight = 0;
    this.draggedHeight = 0;
    this.matches = /** @type {Matches | null} */ (null);
    this.match = -1;
    this.launchCache = { event: -1, launched: /** @type {number[]} */ ([]) };
    this.scroller.addEventListener("scroll", () => this.draw(), { passive: true });
    this.search.addEventListener("input", () => this.runSearch());
    this.observer.observe(this.scroller);
  }

  load(/** @type {Scene} */ scene) {
    this.scene = scene;
    this.hover = this.selected = -1;
    this.launchCache = { event: -1, launched: [] };
    foldMinorLanes(scene);
    this.layOut();
    this.reset();
    this.runSearch();
    this.showDetail();
  }

  // ---- where things are

  layOut() {
    const room = this.draggedHeight || Math.max(360, Math.round(window.innerHeight * 0.58));
    this.layout = placeLanes(this.drawn, room, () => this.scroller.scrollTop);
    this.givenHeight = this.layout.height;
    this.scroller.style.height = `${this.layout.height}px`;
    partIn(this.root, ".tl-space").style.height = `${this.layout.total}px`;
    fillGutter(this.gutter, this.layout, (lane) => this.toggle(lane));
    this.measure();
  }

  measure() {
    const layout = /** @type {Layout} */ (this.layout);
    layout.width = this.measureWidth();
    layout.height = this.scroller.clientHeight;
    return layout;
  }

  toggle(/** @type {Lane} */ lane) {
    lane.folded = !lane.folded;
    const top = this.scroller.scrollTop;
    this.layOut();
    this.scroller.scrollTop = top;
    const label = this.gutter.querySelectorAll(".tl-label")[this.drawn.lanes.indexOf(lane)];
    /** @type {HTMLElement | undefined} */ (label)?.focus();
    this.draw();
  }

  // ---- what is in view

  /** @override @param {number} event */
  fit(event = this.selected) {
    if (event >= 0) this.showAround(this.drawn.start[event], this.drawn.end(event), 0.15);
  }

  /** Brings an event into view without changing the zoom more than it must. @param {number} event */
  reveal(event) {
    const { drawn: scene, view } = this;
    const lane = scene.laneOf(event);
    if (lane.folded && scene.rowOf(event) > lane.first_row) this.toggle(lane);
    const [start, end, dur] = [scene.start[event], scene.end(event), scene.dur[event]];
    const length = view.t1 - view.t0;
    if (dur < length / 400) this.showAround(start, end, 60);
    else if (dur > length) this.showAround(start, end, 0.15);
    else if (start < view.t0 || end > view.t1) this.show((start + end - length) / 2, (start + end + length) / 2);
    this.scrollTo(event);
    this.draw();
  }

  scrollTo(/** @type {number} */ event) {
    const { drawn: scene, layout } = this;
    const place = layout?.placeOf(event);
    if (!layout || !place || place.pinned) return;
    const y = place.y + LANE_PAD + (scene.rowOf(event) - place.lane.first_row) * ROW;
    const top = this.scroller.scrollTop;
    if (y < top + layout.pinned + ROW || y > top + layout.height - 2 * ROW) {
      this.scroller.scrollTop = y - layout.pinned - (layout.height - layout.pinned) / 3;
    }
  }

  // ---- drawing

  /** @override */
  drawNow() {
    if (!this.scene) return;
    const began = performance.now();
    const layout = this.measure();
    this.painter.paint(this.scene, layout, this.view, {
      hover: this.hover, selected: this.selected, mask: this.matches?.mask ?? null,
      launched: (event) => this.launched(event),
    });
    this.overview.paint(this.scene, layout.width, this.view);
    this.drawRuler();
    this.frameMs = performance.now() - began;
  }

  launched(/** @type {number} */ event) {
    if (this.launchCache.event !== event) this.launchCache = { event, launched: this.drawn.launchedBy(event) };
    return this.launchCache.launched;
  }

  // ---- gestures

  /** @override */
  acts() { return { ...super.acts(), fit: () => this.fit(), next: () => this.step(1), previous: () => this.step(-1) }; }

  /** @override */
  resize() {
    if (!this.scene) return;
    // The corner of the lanes can be dragged: keep that height when lanes fold.
    const height = this.scroller.offsetHeight;
    if (height && Math.abs(height - this.givenHeight) > 1) this.draggedHeight = height;
    this.draw();
  }

  /** @override @param {MouseEvent} pointer */
  eventAt({ offsetX, offsetY }) {
    const { layout, scene, view } = this;
    if (!layout || !scene) return -1;
    const place = layout.lanes.find((lane) => (lane.pinned || offsetY >= layout.pinned)
      && offsetY >= layout.top(lane) && offsetY < layout.top(lane) + lane.height);
    if (!place) return -1;
    const depth = Math.floor((offsetY - layout.top(place) - LANE_PAD) / ROW);
    if (depth < 0 || depth >= (place.lane.folded ? 1 : place.lane.rows)) return -1;
    const perPixel = (view.t1 - view.t0) / layout.width;
    return scene.at(place.lane.first_row + depth, view.t0 + offsetX * perPixel, perPixel * 2);
  }

  // ---- hovering, selecting

  /** @override @param {number} event */
  tipText(event) { return [this.drawn.label(event), ...tipLines(this.drawn, event)]; }

  /** @override @param {number} event */
  select(event) {
    this.selected = event;
    this.showDetail();
    this.draw();
  }

  showDetail() {
    if (!this.scene) return;
    const launched = this.selected >= 0 ? this.launched(this.selected) : [];
    fillDetail(this.detail, this.scene, this.selected, launched, (event) => this.go(event));
  }

  go(/** @type {number} */ event) {
    this.select(event);
    this.reveal(event);
  }

  // ---- searching

  find(/** @type {string} */ text) {
    this.search.value = text;
    this.runSearch();
    if (this.matches?.events.length) this.step(1);
  }

  runSearch() {
    if (!this.scene) return;
    const text = this.search.value.trim();
    this.matches = text ? this.scene.find(text) : null;
    this.match = -1;
    this.count.textContent = this.countText();
    this.root.classList.toggle("is-searching", Boolean(this.matches));
    this.draw();
  }

  countText() {
    if (!this.matches) return "";
    const { events, busy } = this.matches;
    if (!events.length) return "no match";
    const times = [busy.device && `${duration(busy.device)} device`, busy.host && `${duration(busy.host)} CPU`];
    const at = this.match >= 0 ? `${count(this.match + 1)} of ` : "";
    return [`${at}${count(events.length)}`, ...times.filter(Boolean)].join(" · ");
  }

  /** To the next or previous match. @param {number} by */
  step(by) {
    if (!this.matches?.events.length) return;
    const { events } = this.matches;
    if (this.match < 0) this.match = by > 0 ? -1 : 0;
    this.match = (this.match + by + events.length) % events.length;
    this.count.textContent = this.countText();
    this.go(events[this.match]);
  }

  /** To a neighbour of the selection: before and after in its row, above and below in its stack. @param {number} dx @param {number} dy */
  moveSelection(dx, dy) {
    const { drawn: scene, selected } = this;
    if (selected < 0) return;
    const row = scene.rowOf(selected);
    const lane = scene.laneOf(selected);
    let target = selected + dx;
    if (dy) {
      const next = row + dy;
      const inside = next >= lane.first_row && next < lane.first_row + lane.rows;
      const half = scene.dur[selected] / 2;
      target = inside ? scene.at(next, scene.start[selected] + half, half) : -1;
    } else if (target < scene.rowStart[row] || target >= scene.rowStart[row + 1]) {
      target = -1;
    }
    if (target >= 0) this.go(target);
  }

  clear() {
    this.search.value = "";
    this.runSearch();
    this.select(-1);
  }
}

registerPane("timeline", (section) => {
  const timeline = new Timeline(partIn(section, ".tl"));
  const [nothing, leftOut] = [partIn(section, ".tl-none"), partIn(section, ".tl-left-out")];
  listenToKeys(timeline, /** @type {HTMLDialogElement} */ (document.querySelector("#help")));
  return {
    showRank(data, problem) {
      const scene = data?.picture ? new Scene(data.picture, data.columns) : null;
      leftOut.textContent = scene?.leftOut ?? "";
      leftOut.hidden = !scene?.leftOut;
      const why = problem || (!scene ? "This rank was not drawn." : scene.start.length ? "" : "No events to draw.");
      timeline.root.hidden = Boolean(why);
      nothing.hidden = !why;
      nothing.textContent = why;
      if (scene?.start.length) timeline.load(scene);
    },
    draw() {
      timeline.draw();
      timeline.showDetail();
    },
    drawNow: () => timeline.drawNow(),
    findEvent(name) {
      section.scrollIntoView({ block: "start" });
      timeline.find(name);
    },
    state: () => ({
      view: timeline.scene ? [timeline.view.t0, timeline.view.t1] : null,
      span: timeline.span,
      events: timeline.scene?.drawn ?? 0,
      matches: timeline.matches?.events.length ?? 0,
      match: timeline.match,
      selected: timeline.selected >= 0 ? timeline.drawn.label(timeline.selected) : null,
      lastFrameMs: timeline.frameMs,
    }),
    handle: {
      find: (/** @type {string} */ text) => timeline.find(text),
      /** Draws at once and reads a pixel back, so that the time includes the drawing itself. */
      redraw() {
        const began = performance.now();
        timeline.drawNow();
        context(timeline.canvas).getImageData(0, 0, 1, 1);
        return performance.now() - began;
      },
    },
  };
});
