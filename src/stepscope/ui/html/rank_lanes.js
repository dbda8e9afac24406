// Some ranks on the one clock: their steps, the collectives that join them, and the critical path.

const LANE = { path: 44, strip: 15, row: 15, bar: 13, pad: 7 };

class RankScene {
  constructor(job) {
    const { columns, lanes } = job;
    Object.assign(this, { lanes, came: columns.last, path: job.path || null, span: Math.max(lanes.span, 1) });
    for (const name of ["match", "place", "row", "kind", "size", "arrival", "start", "end"]) this[name] = columns[`lane_${name}`];
    this.count = this.match.length;
    const main = Math.max(0, lanes.ranks.indexOf(lanes.reference));
    this.steps = lanes.steps.filter(([place]) => place === main).map(([, number, start, end]) => [`step ${number}`, start, end - start]);
    this.accused = new Map(job.stragglers);
    this.gather();
    this.pieces = this.path ? Array.from(columns.path_start, (start, k) => ({
      rank: columns.path_rank[k], start, end: columns.path_end[k],
      kind: this.path.kinds[columns.path_kind[k]], label: this.path.labels[columns.path_label[k]],
      place: lanes.ranks.indexOf(columns.path_rank[k]),
    })) : [];
  }

  // The members of each match from the top lane down, and which of them came last.
  gather() {
    const matches = Math.max(-1, ...this.match) + 1;
    this.members = Array.from({ length: matches }, () => []);
    for (let i = 0; i < this.count; i++) this.members[this.match[i]].push(i);
    this.members.forEach((list) => list.sort((a, b) => this.place[a] - this.place[b]));
    this.last = this.members.map((list) => list.reduce((l, i) => (this.arrival[i] > this.arrival[l] ? i : l), list[0]));
    this.rows = this.lanes.ranks.map(() => 1);
    for (let i = 0; i < this.count; i++) this.rows[this.place[i]] = Math.max(this.rows[this.place[i]], this.row[i] + 1);
  }

  waits(i) {
    return this.lanes.waiting[this.kind[i]];
  }

  // Until then the call waits for others.
  waited(i) {
    return this.waits(i) ? Math.min(this.came[this.match[i]], this.end[i]) : this.arrival[i];
  }

  // When everybody had come and the communication itself had begun.
  through(i) {
    return Math.min(Math.max(this.waited(i), this.start[i]), this.end[i]);
  }

  name(i) {
    return this.lanes.kinds[this.kind[i]];
  }
}

class RankLanes extends Panned {
  constructor(root) {
    super(root.querySelector(".rl-canvas"), root.querySelector(".rl-scroll"));
    this.root = root;
    this.ruler = root.querySelector(".rl-ruler");
    this.gutter = root.querySelector(".rl-labels");
    this.tip = root.querySelector(".tip");
    this.hover = this.selected = -1;
    this.canvas.addEventListener("dblclick", (e) => this.fit(this.eventAt(e)));
    this.scroller.addEventListener("keydown", (e) => this.key(e));
    root.querySelectorAll("[data-act]").forEach((button) =>
      button.addEventListener("click", () => this.act(button.dataset.act)));
    this.ruler.addEventListener("click", (e) => this.showStepAt(e.offsetX));
    new ResizeObserver(() => this.scene && this.draw()).observe(root);
  }

  load(job) {
    this.scene = new RankScene(job);
    this.layOut();
    this.act("path");
  }

  layOut() {
    const { scene } = this;
    let y = scene.path ? LANE.path : 0;
    const tops = scene.lanes.ranks.map((_, place) => {
      const top = y;
      y += LANE.strip + scene.rows[place] * LANE.row + 2 * LANE.pad;
      return top;
    });
    this.layout = { tops, height: y, width: 0 };
    this.scroller.style.height = `${y}px`;
    this.fillGutter();
  }

  fillGutter() {
    const { scene, layout } = this;
    const label = (top, height, title, hint, accused) => {
      const box = element("div", `rl-label${accused ? " is-accused" : ""}`);
      box.style.top = `${top}px`;
      box.style.height = `${height}px`;
      box.append(element("span", "", title), element("small", "", hint));
      return box;
    };
    const boxes = scene.lanes.ranks.map((rank, place) => {
      const error = scene.lanes.errors[place];
      const clock = rank === scene.lanes.reference ? "reference clock" : `clock ±${Format.ns(error)}`;
      const cause = scene.accused.get(rank);
      const hint = cause ? `${cause} · ${clock.replace(/ ?clock ?/, "")}` : clock;
      const next = place + 1 < layout.tops.length ? layout.tops[place + 1] : layout.height;
      return label(layout.tops[place], next - layout.tops[place], `Rank ${rank}`, hint, cause);
    });
    if (scene.path) boxes.unshift(label(0, LANE.path, "Critical path", `step ${scene.path.step}`, false));
    this.gutter.replaceChildren(...boxes);
  }

  act(name) {
    if (!this.scene) return;
    const { path } = this.scene;
    const margin = path ? (path.end - path.start) * 0.03 : 0;
    const acts = {
      in: () => this.zoom(1 / 1.6), out: () => this.zoom(1.6), reset: () => this.reset(),
      path: () => (path ? this.show(path.start - margin, path.end + margin) : this.reset()),
    };
    acts[name]();
  }

  key(event) {
    const keys = {
      w: () => this.zoom(1 / 1.35), s: () => this.zoom(1.35), a: () => this.pan(-0.18), d: () => this.pan(0.18),
      0: () => this.reset(), f: () => this.fit(this.selected),
    };
    const act = keys[event.key.toLowerCase()];
    if (!act || !this.scene || event.ctrlKey || event.metaKey || event.altKey) return;
    act();
    event.preventDefault();
  }

  showStepAt(x) {
    const time = this.view.t0 + (x / this.layout.width) * (this.view.t1 - this.view.t0);
    const step = this.scene.steps.find(([, start, dur]) => time >= start && time < start + dur);
    if (step) this.show(step[1] - step[2] * 0.02, step[1] + step[2] * 1.02);
  }

  // To a whole match, or to a piece of the path.
  fit(event) {
    if (event < 0) return;
    const { scene } = this;
    const piece = event >= scene.count ? scene.pieces[event - scene.count] : null;
    const all = piece ? [] : scene.members[scene.match[event]];
    const from = piece ? piece.start : Math.min(...all.map((i) => scene.arrival[i]));
    const to = piece ? piece.end : Math.max(...all.map((i) => scene.end[i]));
    this.show(from - (to - from) * 0.15, to + (to - from) * 0.15);
  }

  // ---- drawing

  drawNow() {
    if (!this.scene) return;
    const { layout, scene, view } = this;
    layout.width = Math.max(50, this.scroller.clientWidth - this.gutter.offsetWidth);
    const ctx = sizeCanvas(this.canvas, layout.width, layout.height);
    const colors = Palette.get();
    const scale = layout.width / (view.t1 - view.t0);
    const x = (time) => (time - view.t0) * scale;
    const frame = { ctx, colors, scale, x };
    ctx.fillStyle = colors.back;
    ctx.fillRect(0, 0, layout.width, layout.height);
    ctx.font = `11px ${colors.font}`;
    ctx.textBaseline = "middle";
    this.letter = letterWidth(ctx);
    const seen = this.visible();
    this.paintSteps(frame);
    this.paintJoins(frame, seen);
    seen.forEach((i) => this.paintBar(frame, i));
    this.paintErrors(frame);
    this.paintPath(frame);
    this.paintFocus(frame);
    paintRuler(this.ruler, scene, view, layout.width);
  }

  visible() {
    const { scene, view } = this;
    const out = [];
    for (let i = 0; i < scene.count; i++) if (scene.end[i] > view.t0 && scene.arrival[i] < view.t1) out.push(i);
    return out;
  }

  y(i) {
    return this.layout.tops[this.scene.place[i]] + LANE.pad + LANE.strip + this.scene.row[i] * LANE.row;
  }

  paintSteps({ ctx, colors, x, scale }) {
    const { layout, scene } = this;
    for (const top of layout.tops) {
      ctx.fillStyle = colors.line;
      ctx.fillRect(0, top, layout.width, 1);
    }
    for (const [place, number, start, end] of scene.lanes.steps) {
      const [left, right] = [Math.max(x(start), -2), Math.min(x(end), layout.width + 2)];
      if (right <= 0 || left >= layout.width) continue;
      const y = layout.tops[place] + LANE.pad;
      ctx.fillStyle = colors.stepBand;
      ctx.fillRect(left, y, Math.max(right - left - 1, 1), LANE.strip - 3);
      ctx.fillStyle = colors.muted;
      const from = Math.max(left + Math.min(scene.lanes.errors[place] * scale, 300), 0) + 6;
      const text = fitText(`step ${number}`, right - from - 4, this.letter);
      if (text) ctx.fillText(text, from, y + LANE.strip / 2 - 1);
    }
  }

  // Between neighbouring lanes: a thin line from arrival to arrival, a band from there to the end.
  paintJoins({ ctx, colors, x, scale }, seen) {
    const { scene } = this;
    const dense = seen.length > 1200;
    const done = new Set();
    for (const i of seen) {
      const match = scene.match[i];
      if (done.has(match)) continue;
      done.add(match);
      const list = scene.members[match];
      const color = colors.collectives[scene.name(i)];
      for (let k = 0; k + 1 < list.length; k++) {
        const [a, b] = [list[k], list[k + 1]];
        const [from, to] = [this.y(a) + LANE.bar, this.y(b)];
        if (to < from) continue;
        if (!dense || (scene.end[a] - scene.through(a)) * scale > 1) {
          ctx.fillStyle = color.band;
          ctx.beginPath();
          ctx.moveTo(x(scene.through(a)), from);
          ctx.lineTo(x(scene.end[a]), from);
          ctx.lineTo(x(scene.end[b]), to);
          ctx.lineTo(x(scene.through(b)), to);
          ctx.fill();
        }
        if (dense) continue;
        ctx.strokeStyle = color.line;
        ctx.lineWidth = 1;
        ctx.beginPath();
        ctx.moveTo(x(scene.arrival[a]), from);
        ctx.lineTo(x(scene.arrival[b]), to);
        ctx.stroke();
      }
    }
  }

  // Waiting for the last to come is pale and striped, the transfer full.
  paintBar({ ctx, colors, x }, i) {
    const { scene, layout } = this;
    const color = colors.collectives[scene.name(i)];
    const y = this.y(i);
    const clip = (time) => Math.min(Math.max(x(time), -3), layout.width + 3);
    const [came, all, through, end] = [scene.arrival[i], scene.waited(i), scene.through(i), scene.end[i]].map(clip);
    if (all - came > 0.3) {
      ctx.fillStyle = color.pale;
      ctx.fillRect(came, y, all - came, LANE.bar);
      if (all - came > 3) {
        ctx.fillStyle = hatchOf(ctx, color.line);
        ctx.fillRect(came, y, all - came, LANE.bar);
      }
    }
    if (through - all > 1) {
      ctx.fillStyle = color.line;
      ctx.fillRect(all, y + LANE.bar / 2 - 1, through - all, 2);
    }
    ctx.fillStyle = color.solid;
    ctx.fillRect(through, y, Math.max(end - through, 1), LANE.bar);
    ctx.fillRect(came, y, 1.25, LANE.bar);
    const text = end - through > 40 ? fitText(scene.name(i), end - through - 8, this.letter) : "";
    if (!text) return;
    ctx.fillStyle = color.ink;
    ctx.fillText(text, through + 4, y + LANE.bar / 2 + 0.5);
  }

  // How far a rank's lane may be off, at the start of each of its steps.
  paintErrors(frame) {
    const { scene, layout } = this;
    for (const [place, , start] of scene.lanes.steps) {
      if (frame.x(start) < -50 || frame.x(start) > layout.width + 50) continue;
      this.whisker(frame, start, scene.lanes.errors[place], layout.tops[place] + LANE.pad + LANE.strip / 2 - 1);
    }
  }

  whisker({ ctx, colors, x, scale }, time, error, y) {
    if (error * scale < 1.5) return;
    const [left, right] = [x(time - error), x(time + error)];
    ctx.fillStyle = colors.text;
    ctx.fillRect(left, y - 0.5, right - left, 1);
    ctx.fillRect(left - 0.5, y - 4, 1.25, 8);
    ctx.fillRect(right - 0.5, y - 4, 1.25, 8);
  }

  // Its own lane says whose work and which transfer; over the ranks' lanes a line leads the eye.
  paintPath(frame) {
    const { ctx, colors, x } = frame;
    const { scene, layout } = this;
    const rail = (place) => layout.tops[place] + LANE.pad + LANE.strip - 3;
    let before = null;
    for (const piece of scene.pieces) {
      const [left, right] = [Math.max(x(piece.start), -3), Math.min(x(piece.end), layout.width + 3)];
      if (right > 0 && left < layout.width) this.paintPiece(frame, piece, left, right);
      if (piece.place < 0) continue;
      ctx.fillStyle = colors.accent;
      const thick = piece.kind === "transfer" ? 1.5 : 4;
      if (right > left) ctx.fillRect(left, rail(piece.place) - thick / 2, Math.max(right - left, 1), thick);
      if (before && before.place !== piece.place) {
        const [a, b] = [rail(before.place), rail(piece.place)].sort((p, q) => p - q);
        ctx.fillRect(x(piece.start) - 0.75, a, 1.5, b - a);
      }
      before = piece;
    }
  }

  paintPiece({ ctx, colors }, piece, left, right) {
    const transfer = piece.kind === "transfer";
    const color = transfer ? colors.collectives[piece.label] || colors.collectives.other : null;
    ctx.fillStyle = transfer ? color.solid : piece.kind === "input" ? colors.inputBand : colors.accent;
    ctx.fillRect(left, 12, Math.max(right - left - (right - left > 3 ? 0.75 : 0), 0.75), 20);
    const words = transfer ? piece.label : `rank ${piece.rank}${piece.kind === "input" ? " waits for data" : ""}`;
    const text = right - left > 30 ? fitText(words, right - Math.max(left, 0) - 8, this.letter) : "";
    if (!text) return;
    ctx.fillStyle = transfer ? color.ink : piece.kind === "input" ? "#ffffff" : colors.back;
    ctx.fillText(text, Math.max(left, 0) + 4, 22.5);
  }

  paintFocus(frame) {
    const { ctx, colors, x } = frame;
    const { scene, layout } = this;
    const focus = this.hover >= 0 ? this.hover : this.selected;
    if (focus < 0 || focus >= scene.count) return;
    const all = scene.members[scene.match[focus]];
    ctx.strokeStyle = ctx.fillStyle = colors.text;
    ctx.lineWidth = 1.25;
    for (const i of all) {
      const left = Math.max(x(scene.arrival[i]), -4);
      const right = Math.min(x(scene.end[i]), layout.width + 4);
      ctx.strokeRect(left - 0.5, this.y(i) - 0.5, Math.max(right - left, 1) + 1, LANE.bar + 1);
      this.whisker(frame, scene.arrival[i], scene.lanes.errors[scene.place[i]], this.y(i) + LANE.bar / 2);
    }
    if (!scene.waits(focus)) return;
    ctx.setLineDash([3, 3]);
    const at = Math.round(x(scene.came[scene.match[focus]])) + 0.5;
    ctx.beginPath();
    ctx.moveTo(at, this.y(all[0]) - 6);
    ctx.lineTo(at, this.y(all[all.length - 1]) + LANE.bar + 6);
    ctx.stroke();
    ctx.setLineDash([]);
  }

  // ---- pointing

  eventAt({ offsetX, offsetY }) {
    const { scene, view, layout } = this;
    const perPixel = (view.t1 - view.t0) / layout.width;
    const time = view.t0 + offsetX * perPixel;
    const hit = (start, end) => time >= start - 2 * perPixel && time <= end + 2 * perPixel;
    if (scene.path && offsetY < LANE.path) {
      const piece = scene.pieces.findIndex((p) => time >= p.start && time < p.end);
      return piece < 0 ? -1 : scene.count + piece;
    }
    let best = -1;
    for (let i = 0; i < scene.count; i++) {
      const y = this.y(i);
      if (offsetY < y - 1 || offsetY > y + LANE.bar + 1 || !hit(scene.arrival[i], scene.end[i])) continue;
      if (best < 0 || scene.end[i] - scene.arrival[i] < scene.end[best] - scene.arrival[best]) best = i;
    }
    return best;
  }

  setHover(event, pointer) {
    const changed = event !== this.hover;
    this.hover = event;
    this.canvas.classList.toggle("is-over", event >= 0);
    if (event < 0) this.tip.hidden = true;
    else {
      if (changed) this.fillTip(event);
      placeTip(this.tip, pointer);
    }
    if (changed) this.draw();
  }

  select(event) {
    this.selected = event;
    this.draw();
  }

  fillTip(event) {
    const [title, ...lines] = event < this.scene.count ? this.aboutCall(event) : this.aboutPiece(event - this.scene.count);
    this.tip.replaceChildren(tipTitle(title), ...lines.map((line) => element("div", "", line)));
    this.tip.hidden = false;
  }

  aboutCall(i) {
    const { scene } = this;
    const { ranks } = scene.lanes;
    const size = scene.size[i] ? ` of ${Format.bytes(scene.size[i] - 1)}` : "";
    const lines = [`Rank ${ranks[scene.place[i]]}: ${scene.name(i)}${size}`];
    lines.push(...this.aboutWait(i));
    lines.push(`transfer ${Format.ns(scene.end[i] - scene.waited(i))}, from arrival to end ${Format.ns(scene.end[i] - scene.arrival[i])}`);
    return lines;
  }

  aboutWait(i) {
    const { scene } = this;
    const { ranks, errors } = scene.lanes;
    const match = scene.match[i];
    const drawn = scene.members[match].length;
    if (!scene.waits(i)) return [];
    if (scene.came[match] > scene.arrival[scene.last[match]]) return [`waited ${Format.ns(scene.waited(i) - scene.arrival[i])} for a rank that is not drawn`];
    if (drawn < 2) return [];
    const last = scene.last[match];
    if (last === i) return [`the last of ${drawn} drawn ranks to arrive`];
    const error = errors[scene.place[i]] + errors[scene.place[last]];
    const wait = scene.arrival[last] - scene.arrival[i];
    if (wait <= error) return [`wait not resolved: below the clocks' ± ${Format.ns(error)}`];
    return [`waited ${Format.ns(wait)} ± ${Format.ns(error)} for rank ${ranks[scene.place[last]]}`];
  }

  aboutPiece(k) {
    const { path, pieces } = this.scene;
    const piece = pieces[k];
    const words = { work: `Rank ${piece.rank}'s own work`, input: `Rank ${piece.rank} waits for data`, transfer: `Transfer: ${piece.label}` };
    const took = piece.end - piece.start;
    const drawn = piece.place < 0 ? ["this rank is not drawn below"] : [];
    return [words[piece.kind], `${Format.ns(took)}, ${Format.percent(took / (path.end - path.start))} of step ${path.step}`, ...drawn];
  }
}
