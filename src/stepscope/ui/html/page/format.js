// Numbers and names as people read them. Figures follow the rules of text/figures.py;
// tests/records/figures.json holds cases that both must pass.

import { SHARED } from "./shared.js";

/** @type {Units} */
const DURATIONS = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];
/** @type {Units} */
const SIZES = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];
/** @type {Units} */
const RATES = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
const WHOLE = ["ns", "B"]; // nobody measures a part of one
/** @type {[whole: number, name: string, part: number, partName: string][]} */
const LONG = [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]];

/** 1234567 as 1,234,567. @param {number} value */
export const count = (value) => grouped(String(value));

/** Three significant digits, never an exponent: 0.0123, 1.23, 12.3, 123, 1,235. @param {number} value */
export function significant(value) {
  const size = Math.abs(value);
  if (size >= 999.5 || size === 0) return grouped(fixed(value, 0));
  let decimals = 2;
  while (decimals && size >= roundsUp(decimals)) decimals--;
  while (decimals < 6 && size < 0.9995 * 10 ** (2 - decimals)) decimals++;
  return fixed(value, decimals);
}

export const milliseconds = (/** @type {number} */ ms) => `${significant(ms)} ms`;

/** To the microsecond, where ranks are told apart by little: 112.345 ms. @param {number} ns */
export const exactMilliseconds = (ns) => `${grouped(fixed(ns / 1e6, 3))} ms`;

/** 1.23 s, 45.6 ms, 789 µs, 12 ns. @param {number} ns */
export const duration = (ns) => scaled(ns, DURATIONS);

/** From two minutes on as people say it: 45.6 s, 12 min 5 s, 3 h 20 min, 2 d 4 h. @param {number} ns */
export const longDuration = (ns) => (ns < 119.5e9 ? duration(ns) : inTwoUnits(ns));

/** @param {number} ns */
function inTwoUnits(ns) {
  for (const [whole, name, part, partName] of LONG) {
    const parts = Math.floor(ns / 1e9 / part + 0.5);
    const many = Math.floor(parts / (whole / part));
    const rest = parts % (whole / part);
    if (many) return rest ? `${count(many)} ${name} ${rest} ${partName}` : `${count(many)} ${name}`;
  }
  return duration(ns);
}

/** A moment on a long ruler, with the units that neighbouring ticks need. @param {number} ns @param {number} step */
export const longTick = (ns, step) => (step < 1e9 || ns < 60e9 ? tick(ns, Math.min(step, 1e9)) : inTwoUnits(ns));

/** 2026-11-16 05:14:24, where the reader is. @param {number} unixMs */
export function clockTime(unixMs) {
  const at = new Date(unixMs - new Date(unixMs).getTimezoneOffset() * 60_000);
  return at.toISOString().slice(0, 19).replace("T", " ");
}

/** A GB is 1e9 bytes. @param {number} bytes */
export const size = (bytes) => scaled(bytes, SIZES);

/** 12.3 TFLOP/s, 456 GB/s. @param {number} perSecond @param {string} unit */
export const rate = (perSecond, unit) =>
  scaled(perSecond, RATES.map(([scale, prefix]) => [scale, prefix + unit]));

/** 36%, 4.2%, <0.1%, 0%. @param {number} share */
export function percent(share) {
  const value = 100 * share;
  const positive = Math.abs(value);
  if (positive > 0 && positive < 0.05) return value > 0 ? "<0.1%" : "0%";
  return `${fixed(value, positive && positive < 9.95 ? 1 : 0)}%`;
}

/** A change keeps the digits that an interval needs: -36%, +12.3%, +0.43%. @param {number} change */
export function signedPercent(change) {
  const value = 100 * change;
  const positive = Math.abs(value);
  if (positive < 0.005) return "0%";
  return `${value > 0 ? "+" : ""}${fixed(value, positive >= 20 ? 0 : positive >= 2 ? 1 : 2)}%`;
}

/** Round values as such: 2%, not 2.0%. @param {string} text */
export const trimmed = (text) => text.replace(/\.0+(?=[ %])/, "");

/** How many times: 1.15, 2.4, 12. @param {number} times */
export const factor = (times) => grouped(fixed(times, times >= 9.95 ? 0 : times >= 1.15 ? 1 : 2));

/** A time on a ruler, with as many digits as neighbouring ticks need to differ. @param {number} ns @param {number} step */
export function tick(ns, step) {
  if (Math.abs(ns) < step / 2) return "0";
  const [scale, unit] = DURATIONS.find(([unitNs]) => step >= unitNs || unitNs === 1) ?? DURATIONS[3];
  const digits = Math.max(0, Math.ceil(-Math.log10(step / scale) - 1e-9));
  return `${grouped((ns / scale).toFixed(digits))} ${unit}`;
}

const PYTHON_FRAME = /^(.*?)([^/\\]+)\((\d+)\): (.+)$/;

/** The part of a name that sets events apart, for labels that have little room. @param {string} name */
export function shortName(name) {
  const frame = PYTHON_FRAME.exec(name);
  if (frame) return `${frame[4]}  ${frame[2]}:${frame[3]}`;
  let text = name.replace(/^void /, "").replaceAll("(anonymous namespace)::", "").replace("autograd::engine::evaluate_function: ", "");
  const angle = text.indexOf("<");
  const head = angle > 0 ? text.slice(0, angle) : text;
  const paren = head.search(/(?<=\w)\(/); // "Memcpy HtoD (Pageable -> Device)" keeps its words
  text = paren > 0 ? head.slice(0, paren) : head;
  if (text.startsWith("at::native::")) text = text.slice(text.lastIndexOf("::") + 2);
  return angle > 0 && paren < 0 ? `${text}<…>` : text;
}

/** A capital for a first word that is plain English, none for names of code, as in text/words.py. @param {string} text */
export function sentence(text) {
  const first = /^([a-z]+)(?:'s)?(?=[ ,;]|: |\. )/.exec(text);
  if (!first || SHARED.names.includes(first[1])) return text;
  return text[0].toUpperCase() + text.slice(1);
}

/** "1 event", "2 events", "1,024 events". @param {number} number @param {string} one */
export const counted = (number, one) => `${count(number)} ${one}${number === 1 ? "" : "s"}`;

/** From here on, this many decimals would be a fourth digit. @param {number} decimals */
const roundsUp = (decimals) => 10 ** (3 - decimals) - 0.5 * 10 ** -decimals;

/** As toFixed, but a tie goes to the even digit, as in Python. @param {number} value @param {number} decimals */
function fixed(value, decimals) {
  const part = (Math.abs(value) * 10 ** decimals) % 1;
  if (Math.abs(part - 0.5) > 1e-9) return value.toFixed(decimals);
  const exact = value.toFixed(decimals + 40);
  const down = exact.slice(0, exact.length - 40).replace(/\.$/, "");
  const tie = /^50*$/.test(exact.slice(-40)) && "02468".includes(down[down.length - 1]);
  return tie ? down : value.toFixed(decimals);
}

function grouped(/** @type {string} */ digits) {
  const [whole, part] = digits.split(".");
  const groups = whole.replace(/\B(?=(\d{3})+$)/g, ",");
  return part === undefined ? groups : `${groups}.${part}`;
}

/** In the largest unit of which it is at least one, after rounding: 999.9 ns is 1.00 µs. @param {number} value @param {Units} units */
function scaled(value, units) {
  const [scale, unit] = units.find(([one]) => Math.abs(value) >= 0.9995 * one) ?? units[units.length - 1];
  const text = WHOLE.includes(unit) ? grouped(fixed(value / scale, 0)) : significant(value / scale);
  return `${text} ${unit}`;
}
