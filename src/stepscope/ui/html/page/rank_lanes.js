// Some ranks on one clock: their steps, the collectives that join them, and the critical path.

import { fillBox, fillShape, fitText, hatchIn, startDrawing, strokeBox, strokeLine, writeText } from "./canvas.js";
import { element } from "./dom.js";
import { duration, percent, size } from "./format.js";
import { getColors } from "./palette.js";
import { RankScene } from "./rank_scene.js";
import { TimeView } from "./time_view.js";

const LANE = { path: 44, strip: 15, row: 15, bar: 13, pad: 7 };

/** @extends {TimeView<RankScene>} */
export class RankLanes extends TimeView {
  constructor(/** @type {HTMLElement} */ root) {
    super(root, "rl", 0.02);
    this.layout = { tops: /** @type {number[]} */ ([]), height: 0 };
    this.scroller.addEventListener("keydown", (event) => this.key(event));
  }

  load(/** @type {RankLanesData} */ data) {
    this.scene = new RankScene(data);
    this.layOut();
    this.act("path");
  }

  layOut() {
    const { drawn: scene } = this;
    let y = scene.path ? LANE.path : 0;
    const tops = scene.rows.map((rows) => {
      const top = y;
      y += LANE.strip + rows * LANE.row + 2 * LANE.pad;
      return top;
    });
    this.layout = { tops, height: y };
    this.scroller.style.height = `${y}px`;
    this.fillGutter();
  }

  fillGutter() {
    const { drawn: scene, layout } = this;
    const boxes = scene.lanes.ranks.map((rank, place) => {
      const own = rank === scene.lanes.reference ? "reference clock" : `clock ±${duration(scene.lanes.errors[place])}`;
      const clock = scene.traced.has(place) ? own : "not traced";
      const cause = scene.stragglers.get(rank);
      const hint = cause ? `${cause} · ${clock.replace(/ ?clock ?/, "")}` : clock;
      const next = layout.tops[place + 1] ?? layout.height;
      return laneLabel(layout.tops[place], next - layout.tops[place], `Rank ${rank}`, hint, Boolean(cause));
    });
    if (scene.path) boxes.unshift(laneLabel(0, LANE.path, "Critical path", `step ${scene.path.step}`, false));
    this.gutter.replaceChildren(...boxes);
  }

  /** @override */
  acts() { return { ...super.acts(), path: () => this.showPath() }; }

  showPath() {
    const path = this.scene?.path;
    if (path) this.showAround(path.start, path.end, 0.03);
    else this.reset();
  }

  key(/** @type {KeyboardEvent} */ event) {
    const act = this.letters()[event.key.toLowerCase()];
    if (!act || !this.scene || event.ctrlKey || event.metaKey || event.altKey) return;
    act();
    event.preventDefault();
  }

  /** To a whole match, or to a piece of the path. @override @param {number} event */
  fit(event) {
    if (event < 0) return;
    const { drawn: scene } = this;
    const piece = event >= scene.count ? scene.pieces[event - scene.count] : null;
    const calls = piece ? [] : scene.members[scene.match[event]];
    const from = piece ? piece.start : Math.min(...calls.map((i) => scene.arrival[i]));
    const to = piece ? piece.end : Math.max(...calls.map((i) => scene.end[i]));
    this.showAround(from, to, 0.15);
  }

  // ---- drawing

  /** @override */
  drawNow() {
    if (!this.scene) return;
    const { scene, view } = this;
    const ctx = startDrawing(this.canvas, this.measureWidth(), this.layout.height);
    const scale = this.width / (view.t1 - view.t0);
    const frame = { ctx, colors: getColors(), scale, x: (/** @type {number} */ time) => (time - view.t0) * scale };
    const seen = [...scene.end.keys()].filter((i) => scene.end[i] > view.t0 && scene.arrival[i] < view.t1);
    this.paintSteps(frame);
    this.paintJoins(frame, seen);
    seen.forEach((i) => this.paintBar(frame, i));
    this.paintErrors(frame);
    this.paintPath(frame);
    this.paintFocus(frame);
    this.drawRuler();
  }

  y(/** @type {number} */ call) {
    const { place, row } = this.drawn;
    return this.layout.tops[place[call]] + LANE.pad + LANE.strip + row[call] * LANE.row;
  }

  paintSteps(/** @type {RankFrame} */ { ctx, colors, x, scale }) {
    const { layout, drawn: scene, width } = this;
    layout.tops.forEach((top) => fillBox(ctx, colors.line, 0, top, width, 1));
    for (const [place, number, start, end] of scene.lanes.steps) {
      const [left, right] = [Math.max(x(start), -2), Math.min(x(end), width + 2)];
      if (right <= 0 || left >= width) continue;
      const y = layout.tops[place] + LANE.pad;
      fillBox(ctx, colors.stepBand, left, y, Math.max(right - left - 1, 1), LANE.strip - 3);
      const from = Math.max(left + Math.min(scene.lanes.errors[place] * scale, 300), 0) + 6;
      writeText(ctx, colors.muted, fitText(ctx, `step ${number}`, right - from - 4), from, y + LANE.strip / 2 - 1);
    }
  }

  /** Between neighbouring lanes: a thin line from arrival to arrival, a band from there to the end. @param {RankFrame} frame @param {number[]} seen */
  paintJoins({ ctx, colors, x, scale }, seen) {
    const { drawn: scene } = this;
    const dense = seen.length > 1200;
    for (const match of new Set(seen.map((i) => scene.match[i]))) {
      const list = scene.members[match];
      const color = colors.collectives[scene.name(list[0])];
      for (let k = 0; k + 1 < list.length; k++) {
        const [a, b] = [list[k], list[k + 1]];
        const [from, to] = [this.y(a) + LANE.bar, this.y(b)];
        if (to < from) continue;
        if (!dense || (scene.end[a] - scene.transferStart(a)) * scale > 1) {
          const top = [scene.transferStart(a), scene.end[a]].map((time) => [x(time), from]);
          const bottom = [scene.end[b], scene.transferStart(b)].map((time) => [x(time), to]);
          fillShape(ctx, color.band, [...top, ...bottom]);
        }
        if (!dense) strokeLine(ctx, color.line, 1, [[x(scene.arrival[a]), from], [x(scene.arrival[b]), to]]);
      }
    }
  }

  /** Waiting for the last to come is pale and striped, the transfer full. @param {RankFrame} frame @param {number} i */
  paintBar({ ctx, colors, x }, i) {
    const { drawn: scene, width } = this;
    const color = colors.collectives[scene.name(i)];
    const y = this.y(i);
    const [came, all, begun, end] = [scene.arrival[i], scene.waitEnd(i), scene.transferStart(i), scene.end[i]]
      .map((time) => Math.min(Math.max(x(time), -3), width + 3));
    if (all - came > 0.3) fillBox(ctx, color.pale, came, y, all - came, LANE.bar);
    if (all - came > 3) fillBox(ctx, hatchIn(ctx, color.line), came, y, all - came, LANE.bar);
    if (begun - all > 1) fillBox(ctx, color.line, all, y + LANE.bar / 2 - 1, begun - all, 2);
    fillBox(ctx, color.solid, begun, y, Math.max(end - begun, 1), LANE.bar);
    fillBox(ctx, color.solid, came, y, 1.25, LANE.bar);
    if (end - begun <= 40) return;
    writeText(ctx, color.ink, fitText(ctx, scene.name(i), end - begun - 8), begun + 4, y + LANE.bar / 2 + 0.5);
  }

  /** How far a rank's lane may be off, at the start of each of its steps. @param {RankFrame} frame */
  paintErrors(frame) {
    const { drawn: scene, layout } = this;
    for (const [place, , start] of scene.lanes.steps) {
      if (frame.x(start) < -50 || frame.x(start) > this.width + 50) continue;
      this.whisker(frame, start, scene.lanes.errors[place], layout.tops[place] + LANE.pad + LANE.strip / 2 - 1);
    }
  }

  /** @param {RankFrame} frame @param {number} time @param {number} error @param {number} y */
  whisker({ ctx, colors, x, scale }, time, error, y) {
    if (error * scale < 1.5) return;
    const [left, right] = [x(time - error), x(time + error)];
    fillBox(ctx, colors.text, left, y - 0.5, right - left, 1);
    [left, right].forEach((end) => fillBox(ctx, colors.text, end - 0.5, y - 4, 1.25, 8));
  }

  /** Its own lane says whose work and which transfer; over the ranks' lanes a line leads the eye. @param {RankFrame} frame */
  paintPath(frame) {
    const { ctx, colors, x } = frame;
    const { drawn: scene, layout, width } = this;
    const rail = (/** @type {number} */ place) => layout.tops[place] + LANE.pad + LANE.strip - 3;
    let before = /** @type {Piece | null} */ (null);
    for (const piece of scene.pieces) {
      const [left, right] = [Math.max(x(piece.start), -3), Math.min(x(piece.end), width + 3)];
      if (right > 0 && left < width) this.paintPiece(frame, piece, left, right);
      if (piece.place < 0) continue;
      const thick = piece.kind === "transfer" ? 1.5 : 4;
      if (right > left) fillBox(ctx, colors.accent, left, rail(piece.place) - thick / 2, Math.max(right - left, 1), thick);
      if (before && before.place !== piece.place) {
        const [a, b] = [rail(before.place), rail(piece.place)].sort((p, q) => p - q);
        fillBox(ctx, colors.accent, x(piece.start) - 0.75, a, 1.5, b - a);
      }
      before = piece;
    }
  }

  /** @param {RankFrame} frame @param {Piece} piece @param {number} left @param {number} right */
  paintPiece({ ctx, colors }, piece, left, right) {
    const transfer = piece.kind === "transfer";
    const color = colors.collectives[piece.label] || colors.collectives.other;
    const [fill, ink] = transfer ? [color.solid, color.ink]
      : piece.kind === "input" ? [colors.inputBand, "#ffffff"] : [colors.accent, colors.back];
    fillBox(ctx, fill, left, 12, Math.max(right - left - (right - left > 3 ? 0.75 : 0), 0.75), 20);
    const words = transfer ? piece.label : `rank ${piece.rank}${piece.kind === "input" ? " waits for data" : ""}`;
    const from = Math.max(left, 0);
    if (right - left > 30) writeText(ctx, ink, fitText(ctx, words, right - from - 8), from + 4, 22.5);
  }

  paintFocus(/** @type {RankFrame} */ frame) {
    const { ctx, colors, x } = frame;
    const { drawn: scene } = this;
    const focus = this.hover >= 0 ? this.hover : this.selected;
    if (focus < 0 || focus >= scene.count) return;
    const all = scene.members[scene.match[focus]];
    for (const i of all) {
      const left = Math.max(x(scene.arrival[i]), -4);
      const right = Math.min(x(scene.end[i]), this.width + 4);
      strokeBox(ctx, colors.text, 1.25, left - 0.5, this.y(i) - 0.5, Math.max(right - left, 1) + 1, LANE.bar + 1);
      this.whisker(frame, scene.arrival[i], scene.lanes.errors[scene.place[i]], this.y(i) + LANE.bar / 2);
    }
    if (!scene.waits(focus)) return;
    ctx.setLineDash([3, 3]);
    const at = Math.round(x(scene.complete[scene.match[focus]])) + 0.5;
    strokeLine(ctx, colors.text, 1.25, [[at, this.y(all[0]) - 6], [at, this.y(all[all.length - 1]) + LANE.bar + 6]]);
    ctx.setLineDash([]);
  }

  // ---- pointing

  /** @override @param {MouseEvent} pointer */
  eventAt({ offsetX, offsetY }) {
    const { drawn: scene, view } = this;
    const perPixel = (view.t1 - view.t0) / this.width;
    const time = view.t0 + offsetX * perPixel;
    if (scene.path && offsetY < LANE.path) {
      const piece = scene.pieces.findIndex((p) => time >= p.start && time < p.end);
      return piece < 0 ? -1 : scene.count + piece;
    }
    let best = -1;
    for (let i = 0; i < scene.count; i++) {
      const y = this.y(i);
      if (offsetY < y - 1 || offsetY > y + LANE.bar + 1) continue;
      if (time < scene.arrival[i] - 2 * perPixel || time > scene.end[i] + 2 * perPixel) continue;
      if (best < 0 || scene.end[i] - scene.arrival[i] < scene.end[best] - scene.arrival[best]) best = i;
    }
    return best;
  }

  /** @override @param {number} event */
  tipText(event) {
    const { count } = this.drawn;
    return event < count ? this.aboutCall(event) : this.aboutPiece(event - count);
  }

  aboutCall(/** @type {number} */ i) {
    const { drawn: scene } = this;
    const bytes = scene.size[i] ? ` of ${size(scene.size[i] - 1)}` : "";
    return [
      `Rank ${scene.lanes.ranks[scene.place[i]]}: ${scene.name(i)}${bytes}`,
      ...this.aboutWait(i),
      `transfer ${duration(scene.end[i] - scene.waitEnd(i))}, from arrival to end ${duration(scene.end[i] - scene.arrival[i])}`,
    ];
  }

  aboutWait(/** @type {number} */ i) {
    const { drawn: scene } = this;
    const { ranks, errors } = scene.lanes;
    const match = scene.match[i];
    const last = scene.last[match];
    const drawn = scene.members[match].length;
    if (!scene.waits(i)) return [];
    if (scene.complete[match] > scene.arrival[last]) return [`waited ${duration(scene.waitEnd(i) - scene.arrival[i])} for a rank that is not drawn`];
    if (drawn < 2) return [];
    if (last === i) return [`the last of ${drawn} drawn ranks to arrive`];
    const error = errors[scene.place[i]] + errors[scene.place[last]];
    const wait = scene.arrival[last] - scene.arrival[i];
    if (wait <= error) return [`wait not resolved: below the clocks' ± ${duration(error)}`];
    return [`waited ${duration(wait)} ± ${duration(error)} for rank ${ranks[scene.place[last]]}`];
  }

  aboutPiece(/** @type {number} */ k) {
    const { path, pieces } = this.drawn;
    const piece = pieces[k];
    const words = { work: `Rank ${piece.rank}'s own work`, input: `Rank ${piece.rank} waits for data`, transfer: `Transfer: ${piece.label}` };
    const took = piece.end - piece.start;
    const drawn = piece.place < 0 ? ["this rank is not drawn below"] : [];
    const share = path ? `, ${percent(took / (path.end - path.start))} of step ${path.step}` : "";
    return [words[piece.kind], `${duration(took)}${share}`, ...drawn];
  }
}

/** @param {number} top @param {number} height @param {string} title @param {string} hint @param {boolean} straggler */
function laneLabel(top, height, title, hint, straggler) {
  const box = element("div", `rl-label${straggler ? " is-accused" : ""}`);
  box.style.top = `${top}px`;
  box.style.height = `${height}px`;
  box.append(element("span", "", title), element("small", "", hint));
  return box;
}
