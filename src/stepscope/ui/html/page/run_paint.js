// Draws the steps of a run: bands behind, what calm steps span, stalls as stems with a shape of
// their cause, lines of the ranks, and single steps where there is room for them.

import { fillBox, hatchIn, strokeLine, writeText } from "./canvas.js";
import { count, duration, factor, percent, trimmed } from "./format.js";
import { emptyColumns, gather } from "./run_series.js";
import { drawShape } from "./run_shapes.js";
import { roundStep } from "./ruler.js";

export const TOP = 22; // room for the names of bands
const BOTTOM = 8;
const SLOT = 9; // pixels between neighbouring shapes of one cause
const POINT_ROOM = 3; // pixels a step must have to be drawn alone
const MOST_POINTS = 8000;
export const MOST_LINES = 8; // ranks that have a line each
const STANDS_OUT = 1.02; // times the middle rank's mean

/** A time as a tick has it. @param {number} us */
export const level = (us) => (us ? trimmed(duration(us * 1e3)) : "0");

/** How high a time lies, so that what is in view fills the chart. @param {ScaleName} name @param {RunSeries[]} shown @param {View} view @param {number} height @returns {LevelScale} */
export function levelScale(name, shown, view, height) {
  const [low, high] = levelRange(name, shown, view);
  const [top, bottom] = [TOP, height - BOTTOM];
  const y = name === "log"
    ? (/** @type {number} */ us) => bottom - ((bottom - top) * Math.log(Math.max(us, 1) / low)) / Math.log(high / low)
    : (/** @type {number} */ us) => bottom - ((bottom - top) * (us - low)) / (high - low);
  return { name, low, high, y: (us) => Math.max(-20, Math.min(bottom + 20, y(us))) };
}

const ROUND = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10];

/** The next round number: the scale must not tremble while the picture is dragged. @param {number} us @param {boolean} up */
export function roundLevel(us, up) {
  const power = 10 ** Math.floor(Math.log10(us));
  const digit = up ? ROUND.find((one) => one * power >= us * 0.9999) : ROUND.findLast((one) => one * power <= us * 1.0001);
  return (digit ?? 10) * power;
}

/** @param {ScaleName} name @param {RunSeries[]} shown @param {View} view */
export function levelRange(name, shown, view) {
  let [low, high, least, most] = [Infinity, 0, Infinity, 0];
  for (const series of shown) {
    const { level: own, first, last } = bucketsIn(series, view);
    const stalls = own.stall.filter((longest) => longest !== null);
    for (let b = first; b < last; b++) {
      if (own.low[b] < low) low = own.low[b];
      if (own.high[b] > high) high = own.high[b];
      for (const longest of stalls) if (longest[b] > high) high = longest[b];
      const mean = own.sum[b] / own.calm[b];
      if (mean < least) least = mean;
      if (mean > most) most = mean;
    }
  }
  const medians = shown.map(({ head }) => head.median);
  if (!most) [least, most, low] = [Math.min(...medians), Math.max(...medians), Math.min(low, ...medians)];
  high = Math.max(high, most * 1.1);
  if (name === "log") return [roundLevel(Math.max(1, low * 0.9), false), roundLevel(high * 1.05, true)];
  if (name === "linear") return [0, roundLevel(high * 1.02, true)];
  const step = roundStep(most / 20);
  return [Math.max(0, Math.floor((least * 0.94) / step) * step), Math.ceil((most * 1.08) / step) * step];
}

/** A level of the pyramid with some hundred buckets in view, without the warm-up. @param {RunSeries} series @param {View} view */
function bucketsIn(series, view) {
  const [from, to] = series.inView(view);
  const level = series.levels.findLast(({ size }) => (to - from) / size >= 200) ?? series.levels[0];
  const warm = from < series.head.warm_up && to > series.head.warm_up + level.size ? series.head.warm_up : from;
  return { level, first: Math.ceil(Math.max(warm, from - level.size + 1) / level.size), last: Math.min(level.low.length, Math.ceil(to / level.size)) };
}

/** Where the axis has a name. @param {LevelScale} scale @param {number} height @returns {number[]} */
export function levelTicks({ name, low, high }, height) {
  const most = Math.max(3, height / 34);
  if (name !== "log" || high / low < 4) {
    const step = roundStep((high - low) / most);
    const first = Math.ceil(low / step);
    return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, i) => (first + i) * step);
  }
  const powers = Array.from({ length: 16 }, (_, power) => 10 ** power);
  const all = [[1, 2, 5], [1, 3], [1]].map((digits) =>
    powers.flatMap((power) => digits.map((digit) => digit * power)).filter((us) => us >= low && us <= high));
  return all.find((ticks) => ticks.length <= most) ?? all[2];
}

/** Whether every step in view has room of its own. @param {RunSeries[]} shown @param {View} view @param {number} width */
export function hasRoom(shown, view, width) {
  const counts = shown.map((series) => series.inView(view)).map(([from, to]) => to - from);
  return Math.max(...counts) * POINT_ROOM <= width && counts.reduce((a, b) => a + b, 0) <= MOST_POINTS;
}

export function paintRun(/** @type {RunFrame} */ frame) {
  const { ctx, colors, width, height, scale, shown, view } = frame;
  for (const us of levelTicks(scale, height)) fillBox(ctx, colors.line, 0, Math.round(scale.y(us)), width, 1);
  paintBands(frame);
  ctx.save();
  ctx.beginPath();
  ctx.rect(0, TOP - 7, width, height - TOP + 7);
  ctx.clip();
  if (hasRoom(shown, view, width)) paintPoints(frame);
  else paintEnvelope(frame);
  ctx.restore();
  paintMedian(frame);
  paintChanges(frame);
}

/** @param {RunFrame} frame @param {number} x */
const toPixel = ({ view, width }, x) => ((x - view.t0) / (view.t1 - view.t0)) * width;

/** Warm-up and windows. The ranks' windows mostly meet: what overlaps is drawn once. @param {RunFrame} frame */
function paintBands(frame) {
  const { shown, colors } = frame;
  union(shown.map((series) => series.warmUp())).forEach((band) => paintBand(frame, band, colors.grey, "warm-up"));
  union(shown.flatMap((series) => series.bands)).forEach((band) => paintBand(frame, band, colors.window, "profiler"));
}

/** @param {Band[]} bands @returns {Band[]} */
export function union(bands) {
  const merged = /** @type {Band[]} */ ([]);
  for (const [from, to] of bands.toSorted((a, b) => a[0] - b[0])) {
    const last = merged.at(-1);
    if (last && from <= last[1]) last[1] = Math.max(last[1], to);
    else merged.push([from, to]);
  }
  return merged;
}

/** @param {RunFrame} frame @param {Band} band @param {string} color @param {string} name */
function paintBand(frame, [from, to], color, name) {
  const { ctx, colors, width, height } = frame;
  if (to <= from) return;
  const left = Math.max(toPixel(frame, from), -2);
  const right = Math.min(Math.max(toPixel(frame, to), left + 2), width + 2);
  if (right < 0 || left > width) return;
  fillBox(ctx, color, left, 0, right - left, height);
  if (right - left > 14) fillBox(ctx, hatchIn(ctx, color), left, 0, right - left, height);
  const fits = ctx.measureText(name).width < Math.min(right, width) - Math.max(left, 0) - 8;
  if (fits) writeText(ctx, colors.muted, name, Math.max(left, 0) + 4, name === "profiler" ? 9 : height - 12);
  else if (name === "profiler" && left > 6) writeText(ctx, colors.muted, "P", (left + right) / 2, 9, "center");
}

function paintEnvelope(/** @type {RunFrame} */ frame) {
  const { ctx, colors, scale, shown, view, width } = frame;
  const columns = emptyColumns(Math.ceil(width), shown);
  const lines = shown.map((series) => gather(series, view, columns));
  ctx.fillStyle = colors.calm.band;
  for (let x = 0; x < columns.low.length; x++) {
    if (columns.low[x] === Infinity) continue;
    const top = scale.y(columns.high[x]);
    ctx.fillRect(x, top, 1, Math.max(scale.y(columns.low[x]) - top, 1));
  }
  paintStems(frame, columns);
  paintLines(frame, lines);
  paintShapes(frame, columns);
}

/** Stems go from the calm steps up to the longest stall. Where causes share a column, the most frequent one has the stem, and a rarer one only what it is longer. @param {RunFrame} frame @param {PixelColumns} columns */
function paintStems({ ctx, colors, scale, shown, hidden }, columns) {
  let floor = columns.high.find(Boolean) ?? scale.low;
  const bases = columns.high.map((us) => scale.y((floor = us || floor)));
  ctx.globalAlpha = scale.name === "typical" ? 0.3 : 1; // there every stall reaches the top
  for (const cause of byFrequency(shown)) {
    const longest = columns.stall[cause];
    if (!longest || hidden.has(cause)) continue;
    ctx.fillStyle = colors.stalls[cause].stem;
    for (let x = 0; x < longest.length; x++) {
      if (!longest[x]) continue;
      const top = scale.y(longest[x]);
      if (top >= bases[x]) continue;
      ctx.fillRect(x, top, 1, bases[x] - top);
      bases[x] = top;
    }
  }
  ctx.globalAlpha = 1;
}

/** Causes, the most frequent first. @param {RunSeries[]} shown */
function byFrequency(shown) {
  const counts = shown[0].stalled.map((_, cause) => shown.reduce((sum, { stalled }) => sum + stalled[cause], 0));
  return [...counts.keys()].sort((a, b) => counts[b] - counts[a]);
}

/** The highest stall of each cause in every slot. Slots move with the steps, so that shapes stay where they are while the picture is dragged. @param {RunFrame} frame @param {PixelColumns} columns */
function paintShapes({ ctx, colors, scale, hidden, view, width }, columns) {
  const shift = Math.round((view.t0 * width) / (view.t1 - view.t0)) % SLOT;
  columns.stall.forEach((longest, cause) => {
    if (!longest || hidden.has(cause)) return;
    for (let from = -((shift + SLOT) % SLOT); from < longest.length; from += SLOT) {
      let best = -1;
      for (let x = Math.max(from, 0); x < Math.min(from + SLOT, longest.length); x++) {
        if (longest[x] && (best < 0 || longest[x] > longest[best])) best = x;
      }
      if (best >= 0 && (scale.name !== "typical" || longest[best] <= scale.high)) drawShape(ctx, colors, cause, best + 0.5, scale.y(longest[best]));
    }
  });
}

/** Each rank's line; with many ranks their mean, and the one that stands out. @param {RunFrame} frame @param {Float64Array[]} lines */
function paintLines(frame, lines) {
  const { shown, colors } = frame;
  const special = standsOut(shown);
  if (lines.length <= MOST_LINES) {
    const color = lines.length > 1 ? colors.calm.faint : colors.calm.line;
    lines.forEach((line) => paintLine(frame, line, color, lines.length > 1 ? 1 : 1.5));
  } else paintLine(frame, meanLine(lines), colors.calm.line, 1.5);
  if (special < 0) return;
  paintLine(frame, lines[special], colors.high, 1.5);
}

/** The slowest rank, if its mean lies clearly above the others'; -1 otherwise. @param {RunSeries[]} shown */
export function standsOut(shown) {
  if (shown.length < 2 || shown.some(({ head }) => head.attempt !== shown[0].head.attempt)) return -1;
  const means = shown.map(({ head }) => head.mean);
  const sorted = means.toSorted((a, b) => a - b);
  const most = sorted[sorted.length - 1];
  return most > STANDS_OUT * sorted[(sorted.length - 1) >> 1] ? means.indexOf(most) : -1;
}

/** @param {Float64Array[]} lines */
function meanLine(lines) {
  return lines[0].map((_, x) => {
    let [sum, many] = [0, 0];
    for (const line of lines) if (!Number.isNaN(line[x])) [sum, many] = [sum + line[x], many + 1];
    return many ? sum / many : NaN;
  });
}

/** @param {RunFrame} frame @param {Float64Array} line @param {string} color @param {number} thick */
function paintLine({ ctx, scale }, line, color, thick) {
  ctx.strokeStyle = color;
  ctx.lineWidth = thick;
  ctx.lineJoin = "round";
  ctx.beginPath();
  for (let x = 0; x < line.length; x++) if (!Number.isNaN(line[x])) ctx.lineTo(x + 0.5, scale.y(line[x]));
  ctx.stroke();
}

function paintPoints(/** @type {RunFrame} */ frame) {
  const { ctx, colors, scale, shown, view, hidden } = frame;
  const special = standsOut(shown);
  for (const [place, series] of shown.entries()) {
    const [from, to] = series.inView(view);
    const color = place === special ? colors.high : shown.length > 1 ? colors.calm.faint : colors.calm.line;
    const xy = Array.from({ length: to - from }, (_, i) => [toPixel(frame, series.x[from + i]), scale.y(series.step[from + i])]);
    strokeLine(ctx, color, 0.75, xy);
    xy.forEach(([x, y], i) => {
      if (series.cause[from + i]) return;
      ctx.fillStyle = series.window[from + i] ? colors.muted : color;
      ctx.beginPath();
      ctx.arc(x, y, 2, 0, 2 * Math.PI);
      ctx.fill();
    });
    xy.forEach(([x, y], i) => {
      const cause = series.cause[from + i] - 1;
      if (cause >= 0 && !hidden.has(cause)) drawShape(ctx, colors, cause, x, Math.max(y, TOP - 2));
    });
  }
}

function paintMedian(/** @type {RunFrame} */ { ctx, colors, scale, shown, width, scene }) {
  const us = shown.length === 1 ? shown[0].head.median : scene.data.all.median;
  const y = Math.round(scale.y(us)) + 0.5;
  ctx.setLineDash([6, 4]);
  strokeLine(ctx, colors.text, 1, [[0, y], [width, y]]);
  ctx.setLineDash([]);
  tag(ctx, colors, `median ${duration(us * 1e3)}`, width - 8, y + 11, "right");
}

/** Text that stays readable on whatever it lies. @param {Ctx} ctx @param {Colors} colors @param {string} words @param {number} x @param {number} y @param {CanvasTextAlign} align */
export function tag(ctx, colors, words, x, y, align, color = colors.text) {
  const wide = ctx.measureText(words).width + 8;
  const left = align === "right" ? x - wide + 4 : align === "center" ? x - wide / 2 : x - 4;
  ctx.globalAlpha = 0.82;
  fillBox(ctx, colors.back, left, y - 7.5, wide, 15);
  ctx.globalAlpha = 1;
  writeText(ctx, color, words, x, y + 0.5, align);
}

function paintChanges(/** @type {RunFrame} */ frame) {
  const { ctx, colors, scene, shown, width, height } = frame;
  const all = new Set(shown.map(({ head }) => head.rank)).size;
  let [right, row] = [-Infinity, 0];
  for (const change of scene.changes(shown)) {
    const [x, low, high] = [change.x, change.low, change.high].map((at) => toPixel(frame, at));
    if (high < -200 || low > width + 200) continue;
    fillBox(ctx, colors.change, low, 0, Math.max(high - low, 1), height);
    ctx.setLineDash([3, 3]);
    strokeLine(ctx, colors.high, 1.5, [[x, 2], [x, height]]);
    ctx.setLineDash([]);
    const ranks = all > 1 && change.ranks.length < all ? `, ${rankWords(change.ranks)}` : "";
    const words = `${changeWords(change.after / change.before)}: ${duration(change.before * 1e3)} to ${duration(change.after * 1e3)}${ranks}`;
    const wide = ctx.measureText(words).width;
    const left = Math.max(4, Math.min(x + 7, width - wide - 8));
    row = left < right ? (row + 1) % 4 : 0;
    right = left + wide + 12;
    tag(ctx, colors, words, left, 9 + 17 * row, "left", colors.high);
  }
}

/** How a step of another level compares. @param {number} ratio */
const changeWords = (ratio) =>
  ratio >= 2 ? `${factor(ratio)} times as long` : `${percent(Math.abs(ratio - 1))} ${ratio < 1 ? "shorter" : "longer"}`;

/** @param {number[]} ranks */
const rankWords = (ranks) => (ranks.length > 3 ? `${count(ranks.length)} ranks` : `rank ${ranks.join(", ")}`);
