// The timeline's state and gestures: what is in view, hovered, selected and searched for.

class Timeline extends Panned {
  constructor(root) {
    super(root.querySelector(".tl-canvas"), root.querySelector(".tl-scroll"));
    this.root = root;
    this.ruler = root.querySelector(".tl-ruler");
    this.gutter = root.querySelector(".tl-labels");
    this.tip = root.querySelector(".tip");
    this.detail = root.querySelector(".tl-detail");
    this.search = root.querySelector(".tl-search");
    this.count = root.querySelector(".tl-count");
    this.painter = new Painter(this.canvas);
    this.overview = new Overview(root.querySelector(".tl-overview"), (a, b) => this.show(a, b));
    this.frameMs = 0;
    this.listen();
  }

  load(scene) {
    this.scene = scene;
    this.hover = this.selected = -1;
    this.found = null;
    this.match = -1;
    this.launchCache = { event: -1, launched: [] };
    foldMinorLanes(scene);
    this.layOut();
    this.reset();
    this.runSearch();
    this.showDetail();
  }

  // ---- where things are

  layOut() {
    const room = this.resized || Math.max(360, Math.round(window.innerHeight * 0.58));
    this.layout = placeLanes(this.scene, room, () => this.scroller.scrollTop);
    this.givenHeight = this.layout.height;
    this.scroller.style.height = `${this.layout.height}px`;
    this.root.querySelector(".tl-space").style.height = `${this.layout.total}px`;
    fillGutter(this.gutter, this.layout, (lane) => this.toggle(lane));
    this.measure();
  }

  measure() {
    this.layout.width = Math.max(50, this.canvas.parentElement.clientWidth - this.gutter.offsetWidth);
    this.layout.height = this.scroller.clientHeight;
  }

  toggle(lane) {
    lane.folded = !lane.folded;
    const at = this.scroller.scrollTop;
    this.layOut();
    this.scroller.scrollTop = at;
    const index = this.scene.lanes.indexOf(lane);
    this.gutter.querySelectorAll(".tl-label")[index]?.focus();
    this.draw();
  }

  // ---- what is in view

  fit(event = this.selected) {
    if (event < 0) return;
    const length = Math.max(this.scene.dur[event] * 1.3, SHORTEST_VIEW_NS);
    const middle = this.scene.start[event] + this.scene.dur[event] / 2;
    this.show(middle - length / 2, middle + length / 2);
  }

  showStepAt(x) {
    const time = this.view.t0 + (x / this.layout.width) * (this.view.t1 - this.view.t0);
    const step = this.scene.steps.find(([, start, dur]) => time >= start && time < start + dur);
    if (step) this.show(step[1] - step[2] * 0.01, step[1] + step[2] * 1.01);
  }

  // Brings an event into view without changing the zoom more than it must.
  reveal(event) {
    const { scene, view, layout } = this;
    const lane = scene.laneOf(event);
    if (lane.folded && scene.rowOf(event) > lane.first_row) this.toggle(lane);
    const [start, end] = [scene.start[event], scene.end(event)];
    const length = view.t1 - view.t0;
    if (scene.dur[event] < length / 400) this.show(start - scene.dur[event] * 60, end + scene.dur[event] * 60);
    else if (scene.dur[event] > length) this.show(start - scene.dur[event] * 0.15, end + scene.dur[event] * 0.15);
    else if (start < view.t0 || end > view.t1) this.show((start + end - length) / 2, (start + end + length) / 2);
    const place = this.layout.placeOf(scene, event);
    if (!place.pinned) {
      const y = place.y + LANE_PAD + (scene.rowOf(event) - lane.first_row) * ROW;
      const top = this.scroller.scrollTop;
      if (y < top + this.layout.pinned + ROW || y > top + layout.height - 2 * ROW) {
        this.scroller.scrollTop = y - this.layout.pinned - (layout.height - this.layout.pinned) / 3;
      }
    }
    this.draw();
  }

  // ---- drawing

  drawNow() {
    if (!this.scene) return;
    const began = performance.now();
    this.measure();
    this.painter.paint(this.scene, this.layout, this.view, {
      hover: this.hover, selected: this.selected, found: this.found,
      launched: (event) => this.launched(event),
    });
    this.overview.paint(this.scene, this.layout.width, this.view);
    paintRuler(this.ruler, this.scene, this.view, this.layout.width);
    this.frameMs = performance.now() - began;
  }

  launched(event) {
    if (this.launchCache.event !== event) {
      this.launchCache = { event, launched: this.scene.launchedBy(event) };
    }
    return this.launchCache.launched;
  }

  // ---- gestures

  listen() {
    const { canvas, scroller } = this;
    scroller.addEventListener("scroll", () => this.draw(), { passive: true });
    canvas.addEventListener("dblclick", (e) => this.fit(this.eventAt(e)));
    this.ruler.addEventListener("click", (e) => this.showStepAt(e.offsetX));
    this.search.addEventListener("input", () => this.runSearch());
    const observer = new ResizeObserver(() => this.resize());
    observer.observe(this.root);
    observer.observe(scroller);
    this.root.querySelectorAll("[data-act]").forEach((button) =>
      button.addEventListener("click", () => this.act(button.dataset.act)));
  }

  act(name) {
    const acts = {
      in: () => this.zoom(1 / 1.6), out: () => this.zoom(1.6), reset: () => this.reset(),
      fit: () => this.fit(), next: () => this.step(1), previous: () => this.step(-1),
    };
    if (this.scene) acts[name]();
  }

  resize() {
    if (!this.scene) return;
    // The corner of the lanes can be dragged: keep that height when lanes fold.
    const height = this.scroller.offsetHeight;
    if (height && Math.abs(height - this.givenHeight) > 1) this.resized = height;
    this.draw();
  }

  eventAt(event) {
    const { layout, scene, view } = this;
    const y = event.offsetY;
    const place = layout.lanes.find((p) => {
      if (!p.pinned && y < layout.pinned) return false;
      return y >= layout.top(p) && y < layout.top(p) + p.height;
    });
    if (!place) return -1;
    const depth = Math.floor((y - layout.top(place) - layout.pad) / ROW);
    if (depth < 0 || depth >= (place.lane.folded ? 1 : place.lane.rows)) return -1;
    const perPixel = (view.t1 - view.t0) / layout.width;
    return scene.at(place.lane.first_row + depth, view.t0 + event.offsetX * perPixel, perPixel * 2);
  }

  // ---- hovering, selecting

  setHover(event, pointer) {
    const changed = event !== this.hover;
    this.hover = event;
    this.canvas.classList.toggle("is-over", event >= 0);
    if (event < 0) this.tip.hidden = true;
    else {
      if (changed) fillTip(this.tip, this.scene, event);
      placeTip(this.tip, pointer);
    }
    if (changed) this.draw();
  }

  select(event) {
    this.selected = event;
    this.showDetail();
    this.draw();
  }

  showDetail() {
    const launched = this.selected >= 0 ? this.launched(this.selected) : [];
    fillDetail(this.detail, this.scene, this.selected, launched, (event) => this.go(event));
  }

  go(event) {
    this.select(event);
    this.reveal(event);
  }

  // ---- searching

  find(text) {
    this.search.value = text;
    this.runSearch();
    if (this.found?.events.length) this.step(1);
  }

  runSearch() {
    if (!this.scene) return;
    const text = this.search.value.trim();
    this.found = text ? this.scene.find(text) : null;
    this.match = -1;
    this.count.textContent = this.found ? this.countText() : "";
    this.root.classList.toggle("is-searching", Boolean(this.found));
    this.draw();
  }

  countText() {
    const { events, busy } = this.found;
    if (!events.length) return "no match";
    const times = [busy.device && `${Format.ns(busy.device)} device`, busy.host && `${Format.ns(busy.host)} host`];
    const at = this.match >= 0 ? `${Format.count(this.match + 1)} of ` : "";
    return [`${at}${Format.count(events.length)}`, ...times.filter(Boolean)].join(" · ");
  }

  step(by) {
    if (!this.found?.events.length) return;
    const { events } = this.found;
    if (this.match < 0) this.match = by > 0 ? -1 : 0;
    this.match = (this.match + by + events.length) % events.length;
    this.count.textContent = this.countText();
    this.go(events[this.match]);
  }

  // Neighbours of the selection: before and after in its row, above and below in its stack.
  neighbour(dx, dy) {
    const { scene, selected } = this;
    if (selected < 0) return;
    const row = scene.rowOf(selected);
    const lane = scene.laneOf(selected);
    let target = selected + dx;
    if (dy) {
      const next = row + dy;
      const inside = next >= lane.first_row && next < lane.first_row + lane.rows;
      const middle = scene.start[selected] + scene.dur[selected] / 2;
      target = inside ? scene.at(next, middle, scene.dur[selected] / 2) : -1;
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
