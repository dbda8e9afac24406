// Batch size against throughput and memory: what a batch would give, and which batch gives what is wanted.

import type { BatchPoint } from "../contract";

/** What one batch size is predicted to give, each with its interval. */
export interface Prediction {
  readonly batch: number;
  readonly stepMs: Interval;
  readonly samplesPerSecond: Interval | null;
  readonly peakBytes: Interval | null;
}

export interface Interval {
  readonly value: number;
  readonly low: number;
  readonly high: number;
}

type Points = readonly BatchPoint[];

/** Fractions of an octave between neighbouring batches: 16 and up go by 1, 32 by 2, 64 by 4. */
const STEPS_AN_OCTAVE = 16;

/** The distance from a batch to the next one offered; a power of two, which is what hardware likes. */
export const stepAt = (batch: number): number => 2 ** Math.max(0, Math.floor(Math.log2(batch / STEPS_AN_OCTAVE)));

/** Batches that can be chosen: within the predicted range, round numbers, and always the one in the code. */
export function offeredBatches(points: Points, current: number): number[] {
  const [first, last] = [points[0], points.at(-1)];
  if (first === undefined || last === undefined) return [];
  const offered = new Set([...points.map((point) => point.batch), current]);
  for (let batch = Math.ceil(first.batch); batch <= last.batch; batch = nextMultiple(batch)) offered.add(batch);
  return [...offered].filter((batch) => Number.isInteger(batch) && batch >= first.batch && batch <= last.batch).sort((a, b) => a - b);
}

function nextMultiple(batch: number): number {
  const step = stepAt(batch);
  return (Math.floor(batch / step) + 1) * step;
}

/** Straight lines between the points; outside them the nearest point's rates are not known, so null. */
export function predictAt(points: Points, batch: number): Prediction | null {
  const after = points.findIndex((point) => point.batch >= batch);
  const right = points[after];
  if (right === undefined) return null;
  const left = right.batch === batch ? right : points[after - 1];
  if (left === undefined) return null;
  const part = left === right ? 0 : (batch - left.batch) / (right.batch - left.batch);
  const between = (a: number, b: number): number => a + (b - a) * part;
  const stepMs = { value: between(left.stepMs, right.stepMs), low: between(left.lowMs, right.lowMs), high: between(left.highMs, right.highMs) };
  return { batch, stepMs, samplesPerSecond: throughput(batch, stepMs, left, right, between), peakBytes: memory(left, right, between) };
}

type Between = (a: number, b: number) => number;

/** Samples a step may be more than the batch in the code: with several ranks each takes one. */
function throughput(batch: number, stepMs: Interval, left: BatchPoint, right: BatchPoint, between: Between): Interval | null {
  if (left.samplesPerSecond === null || right.samplesPerSecond === null) return null;
  const samples = (point: BatchPoint): number => ((point.samplesPerSecond ?? 0) * point.stepMs) / point.batch;
  const perStep = batch * between(samples(left), samples(right));
  return { value: perStep / stepMs.value, low: perStep / stepMs.high, high: perStep / stepMs.low };
}

function memory(left: BatchPoint, right: BatchPoint, between: Between): Interval | null {
  if (left.peakBytes === null || right.peakBytes === null) return null;
  return {
    value: between(left.peakBytes, right.peakBytes),
    low: between(left.peakLowBytes ?? left.peakBytes, right.peakLowBytes ?? right.peakBytes),
    high: between(left.peakHighBytes ?? left.peakBytes, right.peakHighBytes ?? right.peakBytes),
  };
}

export type Quantity = "samplesPerSecond" | "peakBytes";

/** The batch for a wanted amount: the smallest that is as fast, or the largest that takes no more memory. */
export function batchFor(points: Points, offered: readonly number[], quantity: Quantity, wanted: number): number | null {
  const amounts = offered.flatMap((batch) => {
    const amount = predictAt(points, batch)?.[quantity];
    return amount ? [{ batch, amount: amount.value }] : [];
  });
  if (amounts.length === 0) return null;
  if (quantity === "peakBytes") return (amounts.findLast(({ amount }) => amount <= wanted) ?? amounts[0])?.batch ?? null;
  const reaching = amounts.find(({ amount }) => amount >= wanted);
  const fastest = amounts.reduce((best, one) => (one.amount > best.amount ? one : best));
  return (reaching ?? fastest).batch;
}

/** A bar is a little longer than its largest amount, so that most intervals fit on it. */
const ROOM = 1.3;

/** Where a bar ends: what the largest offered amount needs, or the memory there is if that is close. */
export function fullScale(points: Points, offered: readonly number[], quantity: Quantity, capacityBytes: number | null): number | null {
  const amounts = amountsOf(points, offered, quantity);
  if (amounts.length === 0) return null;
  const most = Math.min(Math.max(...amounts.map(({ high }) => high)), ROOM * Math.max(...amounts.map(({ value }) => value)));
  const nearCapacity = quantity === "peakBytes" && capacityBytes !== null && capacityBytes < 1.5 * most;
  return nearCapacity ? Math.max(most, capacityBytes) : most;
}

/** Whether batches differ in this at all; if not, there is nothing to choose by. */
export function canChoose(points: Points, offered: readonly number[], quantity: Quantity): boolean {
  const values = amountsOf(points, offered, quantity).map(({ value }) => value);
  return values.length > 1 && Math.max(...values) > 1.001 * Math.min(...values);
}

const amountsOf = (points: Points, offered: readonly number[], quantity: Quantity): Interval[] =>
  offered.flatMap((batch) => predictAt(points, batch)?.[quantity] ?? []);

/** The batch after a key of a slider, or null when the key means nothing to it. */
export function batchAfterKey(key: string, batch: number, offered: readonly number[]): number | null {
  const next = offered.find((one) => one > batch) ?? batch;
  const previous = offered.findLast((one) => one < batch) ?? batch;
  switch (key) {
    case "ArrowRight": case "ArrowUp": return next;
    case "ArrowLeft": case "ArrowDown": return previous;
    case "PageUp": return offered.find((one) => one >= 2 * batch) ?? offered.at(-1) ?? batch;
    case "PageDown": return offered.findLast((one) => one <= batch / 2) ?? offered[0] ?? batch;
    case "Home": return offered[0] ?? batch;
    case "End": return offered.at(-1) ?? batch;
    default: return null;
  }
}
