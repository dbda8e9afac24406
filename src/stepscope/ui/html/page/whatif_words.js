// What a prediction means, in words: how much it changes, and what the bottleneck is.

import { factor, milliseconds, percent, significant, trimmed } from "./format.js";

/** @param {Predicted} now @param {Predicted} then @param {number} worth */
export function verdict(now, then, worth) {
  const before = `now ${milliseconds(now.step)}`;
  const change = 1 - 1 / then.factor;
  if (Math.abs(change) < worth) return `No real difference (under ${trimmed(percent(worth))}): ${before}`;
  const samples = (then.factor * then.step) / now.step;
  if (Math.abs(samples - 1) > 0.01) {
    const many = `${Number(samples.toPrecision(3))} ${samples > 1 ? "times" : "of"}`;
    return `${factor(then.factor)} times as many samples a second, ${many} the samples a step; ${before}`;
  }
  if (then.factor >= 1.5) return `${factor(then.factor)} times faster: ${before}`;
  if (then.factor >= 1) return `${percent(change)} shorter: ${before}`;
  const slower = 1 / then.factor;
  return slower < 2 ? `${percent(slower - 1)} longer: ${before}` : `${factor(slower)} times as long: ${before}`;
}

/** Who is the bottleneck, and why. @param {Predicted} cell @param {boolean} onHost @param {number} decisive */
export function bottleneck(cell, onHost, decisive) {
  const host = significant(cell.host);
  const device = significant(cell.device);
  const both = onHost ? `the CPU has ${host} ms of work` : `the CPU has ${host} ms of work, the GPU ${device}`;
  const typical = cell.step - cell.stalls; // stalls are nobody's work
  if (cell.exposed > (1 - decisive) * typical) return ["the links", `they add ${milliseconds(cell.exposed)} to the step; ${both}`];
  if (onHost) return ["the CPU", `it has ${host} ms of work; there is no GPU`];
  if (Math.max(cell.host, cell.device) < decisive * typical) return ["neither alone", `they wait for each other: ${both}`];
  return cell.device >= cell.host
    ? ["the GPU", `it has ${device} ms of work, the CPU ${host}`]
    : ["the CPU", `it has ${host} ms of work, the GPU ${device}`];
}
