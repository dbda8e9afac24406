// Ranks by steps as colours, and beside each rank its typical value as a bar.

const HEAT = { head: 24, gutter: 138, side: 300, widest: 96, room: 440 };

class HeatMap {
  constructor(root, onPick) {
    this.root = root;
    this.onPick = onPick;
    this.canvas = root.querySelector(".hm-canvas");
    this.scroller = root.querySelector(".hm-scroll");
    this.space = root.querySelector(".hm-space");
    this.strip = root.querySelector(".hm-strip");
    this.tip = root.querySelector(".tip");
    this.sorting = root.querySelector(".hm-order");
    this.buttons = [...root.querySelectorAll("[data-metric]")];
    this.hover = null;
    this.buttons.forEach((button) => button.addEventListener("click", () => this.choose(button.dataset.metric)));
    this.sorting.addEventListener("change", () => this.sort());
    this.scroller.addEventListener("scroll", () => this.draw(), { passive: true });
    this.canvas.addEventListener("pointermove", (e) => this.move(e));
    this.canvas.addEventListener("pointerleave", () => this.setHover(null));
    this.canvas.addEventListener("click", (e) => this.pick(e));
    this.strip.addEventListener("click", (e) => this.goTo(e));
    new ResizeObserver(() => this.draw()).observe(root);
  }

  load(job) {
    this.job = job;
    this.accused = new Map(job.stragglers);
    this.values = heatValues(job);
    this.typical = {};
    for (const name of Object.keys(this.values)) this.typical[name] = medians(this.values[name], job.ranks.length, job.steps.length);
    this.row = job.ranks.length <= 24 ? 24 : job.ranks.length <= 64 ? 18 : 15;
    this.sorting.value = job.ranks.length * this.row > HEAT.room - HEAT.head ? "value" : "rank";
    this.choose(job.metrics[0][0]);
  }

  choose(metric) {
    this.metric = metric;
    this.scale = heatScale(metric, this.values, this.job.steps.length);
    this.buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.metric === metric)));
    this.root.querySelector(".hm-low").textContent = Format.ns(this.scale.low);
    this.root.querySelector(".hm-high").textContent = `${this.scale.cut ? "≥ " : ""}${Format.ns(this.scale.high)}`;
    this.root.querySelector(".hm-about").textContent = this.job.metrics.find(([id]) => id === metric)[2];
    this.sort();
  }

  sort() {
    const of = this.typical[this.metric];
    this.order = this.job.ranks.map((_, i) => i);
    if (this.sorting.value === "value") this.order.sort((a, b) => (of[b] || 0) - (of[a] || 0) || a - b);
    this.draw();
  }

  draw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.drawNow();
    });
  }

  measure() {
    const width = this.root.clientWidth;
    const total = this.order.length * this.row + HEAT.head;
    const height = Math.min(HEAT.room, total);
    const gutter = width < 700 ? 92 : HEAT.gutter;
    const side = width < 700 ? 110 : HEAT.side;
    const steps = this.job.steps.length;
    const room = Math.max(60, this.scroller.clientWidth - gutter - side);
    const cell = Math.min(HEAT.widest, room / Math.max(steps, 1));
    this.scroller.style.height = `${height}px`;
    this.space.style.height = `${total}px`;
    return { width: this.scroller.clientWidth, height, gutter, cell, end: gutter + cell * steps, side, scrolls: total > height };
  }

  drawNow() {
    if (!this.job) return;
    this.layout = this.measure();
    const { width, height } = this.layout;
    const ctx = sizeCanvas(this.canvas, width, height);
    const colors = Palette.get();
    ctx.fillStyle = colors.back;
    ctx.fillRect(0, 0, width, height);
    ctx.textBaseline = "middle";
    const top = this.scroller.scrollTop;
    const first = Math.floor(top / this.row);
    const last = Math.min(this.order.length, Math.ceil((top + height) / this.row) + 1);
    for (let row = first; row < last; row++) this.drawRow(ctx, colors, this.order[row], HEAT.head + row * this.row - top);
    this.drawHead(ctx, colors);
    this.drawHover(ctx, colors, top);
    this.strip.hidden = !this.layout.scrolls;
    if (this.layout.scrolls) this.drawStrip(colors, first, last);
  }

  drawRow(ctx, colors, place, y) {
    const { gutter, cell, end, side } = this.layout;
    const cause = this.accused.get(this.job.ranks[place]);
    ctx.font = `${cause ? "600 " : ""}12px ${colors.font}`;
    ctx.fillStyle = cause ? colors.high : colors.text;
    ctx.textAlign = "right";
    ctx.fillText(`rank ${this.job.ranks[place]}`, gutter - 12, y + this.row / 2 + 0.5);
    ctx.textAlign = "left";
    if (cause) ctx.fillRect(0, y + 1, 4, this.row - 2);
    this.drawCells(ctx, colors, place, y);
    const value = this.typical[this.metric][place];
    const most = this.scale.most || 1;
    const room = Math.max(20, side - 190);
    ctx.fillStyle = cause ? colors.high : colors.strong;
    if (value > 0) ctx.fillRect(end + 18, y + this.row / 2 - 4, Math.max(1, (room * value) / most), 8);
    ctx.fillStyle = cause ? colors.high : colors.muted;
    const words = Number.isNaN(value) ? "not recorded" : Format.ns(value);
    const at = end + 26 + (value > 0 ? (room * value) / most : 0);
    ctx.fillText(cell && cause && side > 200 ? `${words}  ${cause}` : words, at, y + this.row / 2 + 0.5);
  }

  // Where steps are narrower than a pixel the slowest of them gives it its colour.
  drawCells(ctx, colors, place, y) {
    const { gutter, cell } = this.layout;
    const steps = this.job.steps.length;
    const values = this.values[this.metric];
    const group = Math.max(1, Math.ceil(1 / cell));
    const gap = cell > 8 ? 1 : 0;
    for (let step = 0; step < steps; step += group) {
      let value = NaN;
      for (let i = step; i < Math.min(steps, step + group); i++) {
        const each = values[place * steps + i];
        if (!(value >= each) && !Number.isNaN(each)) value = each;
      }
      const x = gutter + step * cell;
      const width = Math.max(cell * group - gap, 1);
      if (Number.isNaN(value)) {
        ctx.fillStyle = hatchOf(ctx, colors.strong);
        ctx.fillRect(x, y, width, this.row - 1);
        continue;
      }
      const shade = this.shade(value);
      ctx.fillStyle = colors.heat[shade].color;
      ctx.fillRect(x, y, width, this.row - 1);
      if (cell < 56 || this.row < 18) continue;
      ctx.fillStyle = colors.heat[shade].ink;
      ctx.textAlign = "center";
      ctx.font = `11.5px ${colors.font}`;
      ctx.fillText(Format.ns(value), x + width / 2, y + this.row / 2 + 0.5);
      ctx.textAlign = "left";
    }
  }

  shade(value) {
    const { low, high } = this.scale;
    const share = Math.min(1, Math.max(0, (value - low) / (high - low || 1)));
    return Math.round(share * (Palette.HEATS - 1));
  }

  drawHead(ctx, colors) {
    const { width, gutter, cell, end } = this.layout;
    ctx.fillStyle = colors.back;
    ctx.fillRect(0, 0, width, HEAT.head - 2);
    ctx.font = `11px ${colors.font}`;
    ctx.fillStyle = colors.muted;
    const every = Math.max(1, Math.ceil(46 / cell));
    this.job.steps.forEach((number, i) => {
      if (i % every) return;
      ctx.textAlign = "center";
      const text = cell > 56 ? `step ${number}` : String(number);
      ctx.fillText(text, gutter + i * cell + Math.min(cell, 60) / 2, HEAT.head / 2);
    });
    ctx.textAlign = "right";
    if (cell <= 56) ctx.fillText("step", gutter - 12, HEAT.head / 2);
    ctx.textAlign = "left";
    ctx.fillText(this.layout.side > 200 ? "median of the rank's steps" : "median", end + 18, HEAT.head / 2);
  }

  drawHover(ctx, colors, top) {
    if (!this.hover) return;
    const { gutter, cell } = this.layout;
    const { row, step } = this.hover;
    ctx.strokeStyle = colors.text;
    ctx.lineWidth = 1.5;
    const y = HEAT.head + row * this.row - top;
    if (step >= 0) ctx.strokeRect(gutter + step * cell, y, Math.max(cell - 1, 2), this.row - 1);
    else ctx.strokeRect(0.75, y, this.layout.width - 1.5, this.row - 1);
  }

  // All ranks at once, by number: the way to a rank when the rows have to scroll.
  drawStrip(colors, first, last) {
    const width = this.layout.width - HEAT.gutter - 20;
    const ranks = this.job.ranks.length;
    const ctx = sizeCanvas(this.strip, this.layout.width, 56);
    ctx.fillStyle = colors.back;
    ctx.fillRect(0, 0, this.layout.width, 56);
    ctx.font = `11px ${colors.font}`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "right";
    ctx.fillStyle = colors.muted;
    ctx.fillText("all ranks", HEAT.gutter - 12, 20);
    const of = this.typical[this.metric];
    const size = width / ranks;
    for (let x = 0; x < width; x += Math.max(1, size)) {
      let worst = NaN;
      for (let i = Math.floor(x / size); i < Math.max(Math.floor((x + 1) / size), Math.floor(x / size) + 1) && i < ranks; i++) {
        if (!(worst >= of[i]) && !Number.isNaN(of[i])) worst = of[i];
      }
      if (Number.isNaN(worst)) continue;
      ctx.fillStyle = colors.heat[this.shade(worst)].color;
      ctx.fillRect(HEAT.gutter + x, 8, Math.max(1, size) + 0.3, 24);
    }
    const shown = new Set(this.order.slice(first, last));
    this.job.ranks.forEach((rank, i) => {
      const x = HEAT.gutter + (i + 0.5) * size;
      if (shown.has(i)) {
        ctx.fillStyle = colors.accent;
        ctx.fillRect(x - Math.max(size, 1) / 2, 34, Math.max(size, 1), 2.5);
      }
      if (!this.accused.has(rank)) return;
      ctx.fillStyle = colors.high;
      ctx.beginPath();
      ctx.moveTo(x, 8);
      ctx.lineTo(x - 5, 0);
      ctx.lineTo(x + 5, 0);
      ctx.fill();
    });
    ctx.fillStyle = colors.muted;
    ctx.textAlign = "left";
    ctx.fillText(`rank ${this.job.ranks[0]}`, HEAT.gutter, 46);
    ctx.textAlign = "right";
    ctx.fillText(`rank ${this.job.ranks[ranks - 1]}`, HEAT.gutter + width, 46);
  }

  goTo(event) {
    const width = this.layout.width - HEAT.gutter - 20;
    const place = Math.floor(((event.offsetX - HEAT.gutter) / width) * this.job.ranks.length);
    if (place < 0 || place >= this.job.ranks.length) return;
    const row = this.order.indexOf(place);
    this.scroller.scrollTop = row * this.row - this.layout.height / 2;
    this.setHover({ row, place, step: -1 });
  }

  at(event) {
    const { gutter, cell, end } = this.layout;
    const row = Math.floor((event.offsetY - HEAT.head + this.scroller.scrollTop) / this.row);
    if (event.offsetY < HEAT.head || row < 0 || row >= this.order.length) return null;
    const inside = event.offsetX >= gutter && event.offsetX < end;
    return { row, place: this.order[row], step: inside ? Math.floor((event.offsetX - gutter) / cell) : -1 };
  }

  move(event) {
    if (!this.layout) return;
    this.setHover(this.at(event));
    if (!this.hover) return;
    this.fillTip(this.hover);
    placeTip(this.tip, event);
  }

  pick(event) {
    const found = this.at(event);
    if (found) this.onPick(this.job.ranks[found.place]);
  }

  setHover(found) {
    this.hover = found;
    this.canvas.classList.toggle("is-over", Boolean(found));
    if (!found) this.tip.hidden = true;
    this.draw();
  }

  fillTip({ place, step }) {
    const { job } = this;
    const host = job.host[place] >= 0 ? ` · ${job.hosts[job.host[place]]}` : "";
    const cause = this.accused.get(job.ranks[place]);
    const title = `Rank ${job.ranks[place]}${host}${step >= 0 ? ` · step ${job.steps[step]}` : ""}`;
    const value = (name) => (step >= 0 ? this.values[name][place * job.steps.length + step] : this.typical[name][place]);
    const lines = job.metrics.map(([id, label]) => {
      const ns = value(id);
      return `${label}: ${Number.isNaN(ns) ? "not recorded" : exactMs(ns)}`;
    });
    if (step < 0) lines.unshift("median of its steps");
    if (cause) lines.push(`holds the others back: ${cause}`);
    this.tip.replaceChildren(tipTitle(title), ...lines.map((line) => element("div", "", line)));
    this.tip.hidden = false;
  }
}

function exactMs(ns) {
  return `${(ns / 1e6).toLocaleString("en-US", { minimumFractionDigits: 3, maximumFractionDigits: 3 })} ms`;
}

// Values come one larger than they are: zero stands for a step that a rank lacks.
function heatValues(job) {
  const { step, comm, input } = job.columns;
  const known = (column) => Float64Array.from(column, (value) => (value ? value - 1 : NaN));
  const values = { step: known(step), comm: known(comm), input: known(input) };
  return { own: values.step.map((ns, i) => ns - values.comm[i]), ...values };
}

function medians(values, ranks, steps) {
  return Float64Array.from({ length: ranks }, (_, rank) => {
    const own = values.subarray(rank * steps, (rank + 1) * steps).filter((v) => !Number.isNaN(v)).sort();
    return own.length ? (own[(own.length - 1) >> 1] + own[own.length >> 1]) / 2 : NaN;
  });
}

// From pale to dark, so that noise stays pale: times around their median reach at least 15% above
// it, waits begin at zero and reach at least a twentieth of a step.
function heatScale(metric, values) {
  const sorted = values[metric].filter((v) => !Number.isNaN(v)).sort();
  const step = values.step.filter((v) => !Number.isNaN(v)).sort();
  const at = (list, share) => (list.length ? list[Math.floor(share * (list.length - 1))] : 0);
  const [middle, most] = [at(sorted, 0.5), at(sorted, 1)];
  if (metric === "comm" || metric === "input") {
    const high = Math.max(most, at(step, 0.5) * 0.05, 1);
    return { low: 0, high, cut: false, most };
  }
  const high = Math.min(Math.max(most, middle * 1.15), middle * 2);
  return { low: Math.min(at(sorted, 0.02), middle * 0.95), high: high || 1, cut: most > high, most };
}
