// The charts of "What if": SVG made anew whenever a control moves.

import { count, factor, milliseconds, percent, significant } from "./format.js";
import { roundStep } from "./ruler.js";

/** @param {string} name @param {Record<string, string | number>} attributes @param {...(Node | string)} children */
function make(name, attributes, ...children) {
  const part = document.createElementNS("http://www.w3.org/2000/svg", name);
  Object.entries(attributes).forEach(([key, value]) => part.setAttribute(key, String(value)));
  part.append(...children);
  return part;
}

/** @param {string} name @param {number} x @param {number} y @param {string} words */
const text = (name, x, y, words) => make("text", { class: name, x: x.toFixed(1), y: y.toFixed(1) }, words);

const path = (/** @type {string} */ name, /** @type {string} */ d) => make("path", { class: name, d });

/** @param {number[][]} points */
const joined = (points) => `M${points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}`;

/** @param {number} width @param {number} height @param {string} words @param {Node[]} parts */
const drawing = (width, height, words, parts) =>
  make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words }, ...parts);

/** From zero up to the most, about `many` of them. @param {number} most @param {number} many */
function ticks(most, many) {
  const step = roundStep(most / many);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, i) => i * step);
}

const tickWords = (/** @type {number} */ ms) => (ms ? count(Number(ms.toPrecision(3))) : "0 ms");

/** Now and then on one line, with the interval around what is predicted. @param {Predicted} now @param {Predicted} then @param {boolean} changed */
export function drawInterval(now, then, changed) {
  const [width, height, left, right] = [760, 62, 6, 754];
  const top = Math.max(now.high, then.high) * 1.04;
  const x = (/** @type {number} */ value) => left + ((right - left) * value) / top;
  const parts = [path("axis", `M${left} 40H${right}`)];
  ticks(top, 8).forEach((tick) => {
    parts.push(path("tick", `M${x(tick).toFixed(1)} 40v5`));
    if (x(tick) < right - 24) parts.push(text("level", Math.max(x(tick), left + 4), 58, tickWords(tick)));
  });
  parts.push(make("rect", { class: "band", x: x(then.low).toFixed(1), y: 14, width: Math.max(2, x(then.high) - x(then.low)).toFixed(1), height: 22, rx: 4 }));
  if (changed) parts.push(path("was", `M${x(now.step).toFixed(1)} 8V40`));
  parts.push(path("is", `M${x(then.step).toFixed(1)} 10V40`));
  if (changed && Math.abs(x(now.step) - x(then.step)) > 46) {
    const atEnd = x(now.step) > right - 30;
    parts.push(text(atEnd ? "word is-end" : "word", x(now.step) + (atEnd ? -6 : 5), 10, "now"));
  }
  const words = `A step of ${milliseconds(then.step)}, between ${significant(then.low)} and ${significant(then.high)}; now ${milliseconds(now.step)}`;
  return drawing(width, height, words, parts);
}

/** What host, device and links need, now and then; in full colour what communication adds to the step. @param {Predicted} now @param {Predicted} then @param {{ onHost: boolean, links: boolean }} options */
export function drawBars(now, then, { onHost, links }) {
  /** @param {string} name @param {string} kind @param {(at: Predicted) => number} value @param {(at: Predicted) => number} exposed */
  const pair = (name, kind, value, exposed = () => 0) => [
    { name: `${name} now`, value: value(now), exposed: exposed(now), kind: `${kind} is-now` },
    { name: `${name} then`, value: value(then), exposed: exposed(then), kind },
  ];
  const rows = pair("CPU", "host", (at) => at.host);
  if (!onHost) rows.push(...pair("GPU", "device", (at) => at.device));
  else if (!links && now.device) rows.push(...pair("Comm", "device", (at) => at.device));
  if (links) rows.push(...pair("Links", "links", (at) => at.comm, (at) => Math.min(at.exposed, at.comm)));
  const [width, left, right, row] = [420, 84, 342, 24];
  const most = Math.max(...rows.map(({ value }) => value), then.step, now.step) || 1;
  const x = (/** @type {number} */ value) => left + ((right - left) * value) / most;
  const parts = rows.flatMap(({ name, value, exposed, kind }, i) => {
    const y = 8 + i * row + Math.floor(i / 2) * 7;
    const bar = (/** @type {number} */ from, /** @type {string} */ look) =>
      make("rect", { class: look, x: x(from).toFixed(1), y, width: Math.max(1.5, x(value) - x(from)).toFixed(1), height: 17, rx: 3 });
    return [
      text("who", left - 8, y + 9, name),
      bar(0, kind),
      ...(exposed > 0 ? [bar(value - exposed, `${kind} is-shown`)] : []),
      text("value", x(value) + 6, y + 9, milliseconds(value)),
    ];
  });
  const end = 8 + rows.length * row + Math.ceil(rows.length / 2) * 7 - 4;
  parts.unshift(path("step", `M${x(then.step).toFixed(1)} 2V${end}`));
  parts.push(text(x(then.step) > right - 40 ? "word is-end" : "word", x(then.step), end + 12, `step ${milliseconds(then.step)}`));
  return drawing(width, end + 18, rows.map(({ name, value }) => `${name} ${milliseconds(value)}`).join(", "), parts);
}

/** Levels, the band, the curve, and for each point a dot with rows of text under it. @param {Point[]} points @param {PlotOptions} options */
function plot(points, { levels, y, values, ideal, rows, words, size }) {
  const [width, height, left, right, bottom] = size;
  const x = (/** @type {number} */ i) => (points.length > 1 ? left + 24 + ((right - left - 42) * i) / (points.length - 1) : (left + right) / 2);
  const line = (/** @type {(point: Point) => number} */ value) => points.map((point, i) => [x(i), y(value(point))]);
  const parts = levels.flatMap(([value, label]) => [
    path("grid", `M${left} ${y(value).toFixed(1)}H${right}`),
    text("level is-side", left - 8, y(value), label),
  ]);
  const band = [...line((point) => values(point)[2]), ...line((point) => values(point)[1]).reverse()];
  parts.push(path("band", `${joined(band)}Z`));
  if (ideal) parts.push(path("ideal", joined(line(ideal))));
  parts.push(path("curve", joined(line((point) => values(point)[0]))));
  points.forEach((point, i) => {
    const look = { class: `dot${point.chosen ? " is-chosen" : ""}`, r: point.chosen ? 6 : 4 };
    const dot = make("circle", { ...look, cx: x(i).toFixed(1), cy: y(values(point)[0]).toFixed(1) });
    dot.append(make("title", {}, words(point)));
    parts.push(dot);
    rows.forEach((row, k) => {
      const name = k ? "pace" : point.chosen ? "level is-strong" : "level";
      parts.push(text(name, x(i), bottom + 20 + 16 * k, row.text(point)));
    });
  });
  rows.forEach(({ name }, k) => parts.push(text("level is-side", left - 8, bottom + 20 + 16 * k, name)));
  return drawing(width, height, points.map(words).join("; "), parts);
}

/** Step time against one control. @param {Point[]} points @param {string} name */
export function drawCurve(points, name) {
  if (!points.length) return "";
  const [top, bottom] = [14, 150];
  const most = Math.max(...points.map((point) => point.high)) * 1.05;
  return plot(points, {
    size: [420, 198, 58, 412, bottom],
    levels: ticks(most, 4).map((tick) => [tick, tickWords(tick)]),
    y: (value) => bottom - ((bottom - top) * value) / most,
    values: (point) => [point.step, point.low, point.high],
    rows: [
      { name, text: (point) => (point.now && points.length < 7 && point.label !== "traced" ? `${point.label} now` : point.label) },
      { name: "pace", text: (point) => `${factor(point.factor)}×` },
    ],
    words: (point) => `${name} ${point.label}: ${milliseconds(point.step)} (${significant(point.low)} to ${significant(point.high)}), ${factor(point.factor)} times the samples a second`,
  });
}

/** Levels of a logarithmic axis. @param {number} least @param {number} most @returns {[number, string][]} */
function logLevels(least, most) {
  const levels = /** @type {[number, string][]} */ ([]);
  const every = Math.max(1, Math.ceil(Math.log10(most / least) / 4));
  for (let power = Math.floor(Math.log10(least)); 10 ** power <= most; power += every) {
    (most / least < 1000 ? [1, 2, 5] : [1]).forEach((digit) => {
      const value = digit * 10 ** power;
      if (value >= least && value <= most) levels.push([value, value >= 1 ? count(value) : String(Number(value.toPrecision(1)))]);
    });
  }
  return levels;
}

/** Throughput against workers, both doubling from line to line; dashed: with nothing lost. @param {Point[]} points @param {number} rate @param {string} unit @param {number} room */
export function drawScaling(points, rate, unit, room) {
  const width = Math.min(720, Math.max(460, room || 620));
  const [top, bottom] = [14, 206];
  const values = (/** @type {Point} */ { factor: times, step, low, high }) => [times, (times * step) / high, (times * step) / low].map((pace) => pace * rate);
  const knows = points.every((point) => point.efficiency);
  const ideal = (/** @type {Point} */ point) => (point.factor / (point.efficiency ?? 1)) * rate;
  const all = points.flatMap((point) => [...values(point), ...(knows ? [ideal(point)] : [])]);
  const [least, most] = [Math.min(...all) * 0.9, Math.max(...all) * 1.1];
  return plot(points, {
    size: [width, 258, 66, width - 4, bottom],
    levels: logLevels(least, most),
    y: (value) => bottom - ((bottom - top) * Math.log(value / least)) / Math.log(most / least),
    values,
    ...(knows ? { ideal } : {}),
    rows: [{ name: "workers", text: (point) => point.label }, ...(knows ? [{ name: "efficiency", text: (/** @type {Point} */ point) => percent(point.efficiency ?? 1) }] : [])],
    words: (point) => {
      const [pace, low, high] = values(point).map(significant);
      return `${point.label} ${point.label === "1" ? "worker" : "workers"}: ${pace} ${unit} (${low} to ${high}), a step of ${milliseconds(point.step)}${point.efficiency ? `, efficiency ${percent(point.efficiency)}` : ""}`;
    },
  });
}
