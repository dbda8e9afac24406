// Some ranks on one clock: their steps, the collectives that join them, and the critical path.

import { fitText, hatchIn, letterWidth, sizeCanvas } from "./canvas.js";
import { canvasIn, element, fillTip, partIn } from "./dom.js";
import { duration, percent, size } from "./format.js";
import { getColors } from "./palette.js";
import { RankScene } from "./rank_scene.js";
import { paintRuler } from "./ruler.js";
import { TimeView } from "./time_view.js";

/** @typedef {import("./rank_scene.js").Piece} Piece */
/** @typedef {import("./rank_scene.js").RankLanesData} RankLanesData */
/** @typedef {{ ctx: CanvasRenderingContext2D, colors: import("./palette.js").Colors, scale: number, x: (time: number) => number }} Frame */

const LANE = { path: 44, strip: 15, row: 15, bar: 13, pad: 7 };

export class RankLanes extends TimeView {
  /** @param {HTMLElement} root */
  constructor(root) {
    super(root, canvasIn(root, ".rl-canvas"), partIn(root, ".rl-scroll"));
    this.ruler = canvasIn(root, ".rl-ruler");
    this.gutter = partIn(root, ".rl-labels");
    this.layout = { tops: /** @type {number[]} */ ([]), height: 0, width: 1 };
    this.letter = 1;
    /** @type {RankScene | null} */
    this.scene = null;
    this.scroller.addEventListener("keydown", (event) => this.key(event));
    this.ruler.addEventListener("click", (event) => this.showStepAt(event.offsetX, 0.02));
    new ResizeObserver(() => this.scene && this.draw()).observe(root);
  }

  /** @param {RankLanesData} data */
  load(data) {
    this.scene = new RankScene(data);
    this.layOut();
    this.act("path");
  }

  /** The scene, where there is one. */
  get drawn() {
    return /** @type {RankScene} */ (this.scene);
  }

  /** @override */
  get span() {
    return this.scene?.span ?? 0;
  }

  /** @override */
  get width() {
    return this.layout.width;
  }

  /** @override */
  get steps() {
    return this.scene?.steps ?? [];
  }

  layOut() {
    const { drawn: scene } = this;
    let y = scene.path ? LANE.path : 0;
    const tops = scene.rows.map((rows) => {
      const top = y;
      y += LANE.strip + rows * LANE.row + 2 * LANE.pad;
      return top;
    });
    this.layout = { tops, height: y, width: 1 };
    this.scroller.style.height = `${y}px`;
    this.fillGutter();
  }

  fillGutter() {
    const { drawn: scene, layout } = this;
    const boxes = scene.lanes.ranks.map((rank, place) => {
      const clock = rank === scene.lanes.reference ? "reference clock" : `clock ±${duration(scene.lanes.errors[place])}`;
      const cause = scene.stragglers.get(rank);
      const hint = cause ? `${cause} · ${clock.replace(/ ?clock ?/, "")}` : clock;
      const next = layout.tops[place + 1] ?? layout.height;
      return laneLabel(layout.tops[place], next - layout.tops[place], `Rank ${rank}`, hint, Boolean(cause));
    });
    if (scene.path) boxes.unshift(laneLabel(0, LANE.path, "Critical path", `step ${scene.path.step}`, false));
    this.gutter.replaceChildren(...boxes);
  }

  /** @override */
  acts() {
    return { ...super.acts(), path: () => this.showPath() };
  }

  showPath() {
    const path = this.scene?.path;
    if (!path) return this.reset();
    const margin = (path.end - path.start) * 0.03;
    this.show(path.start - margin, path.end + margin);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
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
    this.show(from - (to - from) * 0.15, to + (to - from) * 0.15);
  }

  // ---- drawing

  /** @override */
  drawNow() {
    if (!this.scene) return;
    const { layout, scene, view } = this;
    layout.width = Math.max(50, this.scroller.clientWidth - this.gutter.offsetWidth);
    const ctx = sizeCanvas(this.canvas, layout.width, layout.height);
    const colors = getColors();
    const scale = layout.width / (view.t1 - view.t0);
    const frame = { ctx, colors, scale, x: (/** @type {number} */ time) => (time - view.t0) * scale };
    ctx.fillStyle = colors.back;
    ctx.fillRect(0, 0, layout.width, layout.height);
    ctx.font = `11px ${colors.font}`;
    ctx.textBaseline = "middle";
    this.letter = letterWidth(ctx);
    const seen = this.visibleCalls();
    this.paintSteps(frame);
    this.paintJoins(frame, seen);
    seen.forEach((i) => this.paintBar(frame, i));
    this.paintErrors(frame);
    this.paintPath(frame);
    this.paintFocus(frame);
    paintRuler(this.ruler, scene.steps, view, layout.width);
  }

  visibleCalls() {
    const { drawn: scene, view } = this;
    const seen = [];
    for (let i = 0; i < scene.count; i++) if (scene.end[i] > view.t0 && scene.arrival[i] < view.t1) seen.push(i);
    return seen;
  }

  /** @param {number} call */
  y(call) {
    const { place, row } = this.drawn;
    return this.layout.tops[place[call]] + LANE.pad + LANE.strip + row[call] * LANE.row;
  }

  /** @param {Frame} frame */
  paintSteps({ ctx, colors, x, scale }) {
    const { layout, drawn: scene } = this;
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

  /** Between neighbouring lanes: a thin line from arrival to arrival, a band from there to the end. @param {Frame} frame @param {number[]} seen */
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
          ctx.fillStyle = color.band;
          ctx.beginPath();
          ctx.moveTo(x(scene.transferStart(a)), from);
          ctx.lineTo(x(scene.end[a]), from);
          ctx.lineTo(x(scene.end[b]), to);
          ctx.lineTo(x(scene.transferStart(b)), to);
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

  /** Waiting for the last to come is pale and striped, the transfer full. @param {Frame} frame @param {number} i */
  paintBar({ ctx, colors, x }, i) {
    const { drawn: scene, layout } = this;
    const color = colors.collectives[scene.name(i)];
    const y = this.y(i);
    const clip = (/** @type {number} */ time) => Math.min(Math.max(x(time), -3), layout.width + 3);
    const [came, all, begun, end] = [scene.arrival[i], scene.waitEnd(i), scene.transferStart(i), scene.end[i]].map(clip);
    if (all - came > 0.3) {
      ctx.fillStyle = color.pale;
      ctx.fillRect(came, y, all - came, LANE.bar);
      if (all - came > 3) {
        ctx.fillStyle = hatchIn(ctx, color.line);
        ctx.fillRect(came, y, all - came, LANE.bar);
      }
    }
    if (begun - all > 1) {
      ctx.fillStyle = color.line;
      ctx.fillRect(all, y + LANE.bar / 2 - 1, begun - all, 2);
    }
    ctx.fillStyle = color.solid;
    ctx.fillRect(begun, y, Math.max(end - begun, 1), LANE.bar);
    ctx.fillRect(came, y, 1.25, LANE.bar);
    const text = end - begun > 40 ? fitText(scene.name(i), end - begun - 8, this.letter) : "";
    if (!text) return;
    ctx.fillStyle = color.ink;
    ctx.fillText(text, begun + 4, y + LANE.bar / 2 + 0.5);
  }

  /** How far a rank's lane may be off, at the start of each of its steps. @param {Frame} frame */
  paintErrors(frame) {
    const { drawn: scene, layout } = this;
    for (const [place, , start] of scene.lanes.steps) {
      if (frame.x(start) < -50 || frame.x(start) > layout.width + 50) continue;
      this.whisker(frame, start, scene.lanes.errors[place], layout.tops[place] + LANE.pad + LANE.strip / 2 - 1);
    }
  }

  /** @param {Frame} frame @param {number} time @param {number} error @param {number} y */
  whisker({ ctx, colors, x, scale }, time, error, y) {
    if (error * scale < 1.5) return;
    const [left, right] = [x(time - error), x(time + error)];
    ctx.fillStyle = colors.text;
    ctx.fillRect(left, y - 0.5, right - left, 1);
    ctx.fillRect(left - 0.5, y - 4, 1.25, 8);
    ctx.fillRect(right - 0.5, y - 4, 1.25, 8);
  }

  /** Its own lane says whose work and which transfer; over the ranks' lanes a line leads the eye. @param {Frame} frame */
  paintPath(frame) {
    const { ctx, colors, x } = frame;
    const { drawn: scene, layout } = this;
    const rail = (/** @type {number} */ place) => layout.tops[place] + LANE.pad + LANE.strip - 3;
    /** @type {Piece | null} */
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

  /** @param {Frame} frame @param {Piece} piece @param {number} left @param {number} right */
  paintPiece({ ctx, colors }, piece, left, right) {
    const transfer = piece.kind === "transfer";
    const color = colors.collectives[piece.label] || colors.collectives.other;
    ctx.fillStyle = transfer ? color.solid : piece.kind === "input" ? colors.inputBand : colors.accent;
    ctx.fillRect(left, 12, Math.max(right - left - (right - left > 3 ? 0.75 : 0), 0.75), 20);
    const words = transfer ? piece.label : `rank ${piece.rank}${piece.kind === "input" ? " waits for data" : ""}`;
    const text = right - left > 30 ? fitText(words, right - Math.max(left, 0) - 8, this.letter) : "";
    if (!text) return;
    ctx.fillStyle = transfer ? color.ink : piece.kind === "input" ? "#ffffff" : colors.back;
    ctx.fillText(text, Math.max(left, 0) + 4, 22.5);
  }

  /** @param {Frame} frame */
  paintFocus(frame) {
    const { ctx, colors, x } = frame;
    const { drawn: scene, layout } = this;
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
    const at = Math.round(x(scene.complete[scene.match[focus]])) + 0.5;
    ctx.beginPath();
    ctx.moveTo(at, this.y(all[0]) - 6);
    ctx.lineTo(at, this.y(all[all.length - 1]) + LANE.bar + 6);
    ctx.stroke();
    ctx.setLineDash([]);
  }

  // ---- pointing

  /** @override @param {MouseEvent} pointer */
  eventAt({ offsetX, offsetY }) {
    const { drawn: scene, view, layout } = this;
    const perPixel = (view.t1 - view.t0) / layout.width;
    const time = view.t0 + offsetX * perPixel;
    const hit = (/** @type {number} */ start, /** @type {number} */ end) => time >= start - 2 * perPixel && time <= end + 2 * perPixel;
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

  /** @override @param {number} event */
  fillTip(event) {
    const { count } = this.drawn;
    const [title, ...lines] = event < count ? this.aboutCall(event) : this.aboutPiece(event - count);
    fillTip(this.tip, title, lines);
  }

  /** @param {number} i */
  aboutCall(i) {
    const { drawn: scene } = this;
    const { ranks } = scene.lanes;
    const bytes = scene.size[i] ? ` of ${size(scene.size[i] - 1)}` : "";
    const lines = [`Rank ${ranks[scene.place[i]]}: ${scene.name(i)}${bytes}`];
    lines.push(...this.aboutWait(i));
    lines.push(`transfer ${duration(scene.end[i] - scene.waitEnd(i))}, from arrival to end ${duration(scene.end[i] - scene.arrival[i])}`);
    return lines;
  }

  /** @param {number} i */
  aboutWait(i) {
    const { drawn: scene } = this;
    const { ranks, errors } = scene.lanes;
    const match = scene.match[i];
    const drawn = scene.members[match].length;
    if (!scene.waits(i)) return [];
    if (scene.complete[match] > scene.arrival[scene.last[match]]) return [`waited ${duration(scene.waitEnd(i) - scene.arrival[i])} for a rank that is not drawn`];
    if (drawn < 2) return [];
    const last = scene.last[match];
    if (last === i) return [`the last of ${drawn} drawn ranks to arrive`];
    const error = errors[scene.place[i]] + errors[scene.place[last]];
    const wait = scene.arrival[last] - scene.arrival[i];
    if (wait <= error) return [`wait not resolved: below the clocks' ± ${duration(error)}`];
    return [`waited ${duration(wait)} ± ${duration(error)} for rank ${ranks[scene.place[last]]}`];
  }

  /** @param {number} k */
  aboutPiece(k) {
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
