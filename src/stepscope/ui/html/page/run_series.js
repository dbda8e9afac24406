// All steps of a run: one series for each rank, and pyramids of them, so that a picture of a
// million steps costs no more than its pixels.

import { unzigzag } from "./payload.js";
import { lowerBound } from "./scene.js";

export const BASE = 8; // steps in the smallest buckets

/** Sums of what is stored: each value is the last one, what the step before it took, and the difference. @param {ArrayLike<number>} differences @param {number} first @param {(i: number) => number} usual */
function running(differences, first, usual) {
  const values = new Float64Array(differences.length);
  let last = first;
  for (let i = 0; i < values.length; i++) {
    last += unzigzag(differences[i]) + usual(i);
    values[i] = last;
  }
  return values;
}

/** One rank in one attempt. Times are in µs. */
export class RunSeries {
  /** @param {RunData} data @param {number} place */
  constructor(data, place) {
    const head = data.series[place];
    const column = (/** @type {string} */ name) => data.columns[`${place}-${name}`];
    this.place = place;
    this.head = head;
    const restarted = data.series.some(({ attempt }) => attempt !== data.series[0].attempt);
    this.name = `Rank ${head.rank}${restarted ? `, attempt ${head.attempt}` : ""}`;
    this.step = column("step");
    this.cause = column("cause"); // 0: no stall
    this.window = column("window");
    this.calm = column("calm") ?? this.step; // of thinned steps: the mean around each
    this.number = running(column("number"), -1, () => 1);
    const unit = data.unit_us;
    this.start = running(column("start"), 0, (i) => (i ? Math.floor(this.step[i - 1] / unit) : 0)).map((at) => at * unit);
    this.levels = buildPyramid(this, data.causes.length);
    this.stalled = data.causes.map(() => 0); // steps, by cause
    for (let i = 0; i < this.step.length; i++) if (this.cause[i]) this.stalled[this.cause[i] - 1]++;
    this.x = this.number;
    this.bands = /** @type {Band[]} */ ([]); // where the profiler ran
  }

  get length() { return this.step.length; }

  /** Neither stalled nor in a window. @param {number} i */
  isCalm(i) { return !this.cause[i] && !this.window[i]; }

  /** The first step at or after x. @param {number} x */
  at(x) { return lowerBound(this.x, x, 0, this.length); }

  /** Places of the steps in view, and one more on each side. @param {View} view */
  inView({ t0, t1 }) {
    return [Math.max(0, this.at(t0) - 1), Math.min(this.length, this.at(t1) + 1)];
  }

  /** Where the profiler ran, as ranges of x. @returns {Band[]} */
  windows() {
    const bands = /** @type {Band[]} */ ([]);
    for (let i = 0; i < this.length; i++) {
      if (!this.window[i]) continue;
      const from = i;
      while (i + 1 < this.length && this.window[i + 1]) i++;
      bands.push([this.x[from], this.endOf(i)]);
    }
    return bands;
  }

  /** The warm-up, as a range of x. @returns {Band} */
  warmUp() {
    const { warm_up: many } = this.head;
    return [this.x[0], many ? this.endOf(Math.min(many, this.length) - 1) : this.x[0]];
  }

  endOf(/** @type {number} */ i) { return i + 1 < this.length ? this.x[i + 1] : this.x[i]; }

  /** Place of the step with this number, or of the nearest that is drawn. @param {number} number */
  placeOf(number) {
    const at = Math.min(this.length - 1, lowerBound(this.number, number, 0, this.length));
    return at > 0 && number - this.number[at - 1] < this.number[at] - number ? at - 1 : at;
  }
}

/** Buckets of 8, 16, 32 and more steps, each level made of the one below. @param {{ step: ArrayLike<number>, calm: ArrayLike<number>, cause: ArrayLike<number>, window: ArrayLike<number> }} series @param {number} causes @returns {PyramidLevel[]} */
export function buildPyramid(series, causes) {
  const levels = [];
  let level = firstLevel(series, causes);
  levels.push(level);
  while (level.low.length > 32) {
    level = nextLevel(level);
    levels.push(level);
  }
  return levels;
}

/** @param {number} size @param {number} many @param {boolean[]} present @returns {PyramidLevel} */
function emptyLevel(size, many, present) {
  return {
    size, low: new Float32Array(many).fill(Infinity), high: new Float32Array(many),
    sum: new Float64Array(many), calm: new Uint32Array(many),
    stall: present.map((known) => (known ? new Float32Array(many) : null)),
  };
}

/** @param {{ step: ArrayLike<number>, calm: ArrayLike<number>, cause: ArrayLike<number>, window: ArrayLike<number> }} series @param {number} causes */
function firstLevel({ step, calm, cause, window }, causes) {
  const present = Array.from({ length: causes }, () => false);
  for (let i = 0; i < step.length; i++) if (cause[i]) present[cause[i] - 1] = true;
  const level = emptyLevel(BASE, Math.ceil(step.length / BASE), present);
  for (let i = 0; i < step.length; i++) {
    if (window[i]) continue;
    const at = Math.floor(i / BASE);
    if (cause[i]) {
      const longest = /** @type {Float32Array} */ (level.stall[cause[i] - 1]);
      longest[at] = Math.max(longest[at], step[i]);
      continue;
    }
    level.low[at] = Math.min(level.low[at], step[i]);
    level.high[at] = Math.max(level.high[at], step[i]);
    level.sum[at] += calm[i];
    level.calm[at] += 1;
  }
  return level;
}

/** Two buckets become one. @param {PyramidLevel} below @returns {PyramidLevel} */
function nextLevel(below) {
  const many = Math.ceil(below.low.length / 2);
  const level = emptyLevel(below.size * 2, many, below.stall.map(Boolean));
  for (let i = 0; i < below.low.length; i++) {
    const at = i >> 1;
    level.low[at] = Math.min(level.low[at], below.low[i]);
    level.high[at] = Math.max(level.high[at], below.high[i]);
    level.sum[at] += below.sum[i];
    level.calm[at] += below.calm[i];
    below.stall.forEach((longest, cause) => {
      const own = level.stall[cause];
      if (own && longest) own[at] = Math.max(own[at], longest[i]);
    });
  }
  return level;
}

/** Columns of pixels with nothing in them. @param {number} width @param {RunSeries[]} shown @returns {PixelColumns} */
export function emptyColumns(width, shown) {
  const causes = shown[0]?.levels[0].stall.length ?? 0;
  return {
    low: new Float32Array(width).fill(Infinity), high: new Float32Array(width),
    stall: Array.from({ length: causes }, (_, cause) =>
      (shown.some(({ levels }) => levels[0].stall[cause]) ? new Float32Array(width) : null)),
  };
}

/** Adds a series to the columns of pixels. Returns the mean of its calm steps in each column, NaN where there is none. @param {RunSeries} series @param {View} view @param {PixelColumns} into */
export function gather(series, view, into) {
  const width = into.low.length;
  const scale = width / (view.t1 - view.t0);
  const [from, to] = series.inView(view);
  const level = series.levels.findLast(({ size }) => size <= (to - from) / width);
  const sums = new Float64Array(width);
  const counts = new Float64Array(width);
  const column = (/** @type {number} */ i) => Math.floor((series.x[i] - view.t0) * scale);
  if (level) gatherBuckets(level, from, to, column, into, sums, counts);
  else gatherSteps(series, from, to, column, into, sums, counts);
  for (let i = 0; i < width; i++) sums[i] = counts[i] ? sums[i] / counts[i] : NaN;
  return sums;
}

/** @param {PyramidLevel} level @param {number} from @param {number} to @param {(i: number) => number} column @param {PixelColumns} into @param {Float64Array} sums @param {Float64Array} counts */
function gatherBuckets(level, from, to, column, into, sums, counts) {
  const last = Math.min(level.low.length, Math.ceil(to / level.size));
  const stalls = level.stall.flatMap((longest, cause) => (longest ? [{ longest, own: /** @type {Float32Array} */ (into.stall[cause]) }] : []));
  for (let b = Math.floor(from / level.size); b < last; b++) {
    const at = column(b * level.size);
    if (at < 0 || at >= into.low.length) continue;
    if (level.low[b] < into.low[at]) into.low[at] = level.low[b];
    if (level.high[b] > into.high[at]) into.high[at] = level.high[b];
    sums[at] += level.sum[b];
    counts[at] += level.calm[b];
    for (const { longest, own } of stalls) if (longest[b] > own[at]) own[at] = longest[b];
  }
}

/** @param {RunSeries} series @param {number} from @param {number} to @param {(i: number) => number} column @param {PixelColumns} into @param {Float64Array} sums @param {Float64Array} counts */
function gatherSteps(series, from, to, column, into, sums, counts) {
  const { step, calm, cause, window } = series;
  for (let i = from; i < to; i++) {
    const at = column(i);
    if (window[i] || at < 0 || at >= into.low.length) continue;
    if (cause[i]) {
      const own = /** @type {Float32Array} */ (into.stall[cause[i] - 1]);
      own[at] = Math.max(own[at], step[i]);
      continue;
    }
    into.low[at] = Math.min(into.low[at], step[i]);
    into.high[at] = Math.max(into.high[at], step[i]);
    sums[at] += calm[i];
    counts[at] += 1;
  }
}

/** The series on one axis that begins at zero: numbers of steps, or time in typical steps. */
export class RunScene {
  constructor(/** @type {RunData} */ data) {
    this.data = data;
    this.series = data.series.map((_, place) => new RunSeries(data, place));
    this.steps = /** @type {StepMark[]} */ ([]);
    this.span = 1;
    this.origin = 0;
    this.unit = Math.max(1, data.all.median); // of the axis of time, in µs
    this.axis = /** @type {Axis1D} */ ("step");
    this.use("step");
  }

  use(/** @type {Axis1D} */ axis) {
    this.axis = axis;
    const places = this.series.map((series) => (axis === "time"
      ? series.start.map((at) => at / this.unit)
      : series.number.map((number) => number + series.head.offset)));
    this.origin = Math.min(...places.map((x) => x[0]));
    this.series.forEach((series, i) => { series.x = places[i].map((x) => x - this.origin); });
    this.span = Math.max(20, ...this.series.map(({ x }) => x[x.length - 1] + 1));
  }

  /** Where a step's number lies on the axis. @param {RunSeries} series @param {number} number */
  xOf(series, number) {
    return this.axis === "step" ? number + series.head.offset - this.origin : series.x[series.placeOf(number)];
  }

  /** Changes of level. Those of several ranks whose intervals meet are one. @param {RunSeries[]} shown */
  changes(shown) {
    const all = shown.flatMap((series) => series.head.changes.map(([step, low, high, before, after]) => {
      const [x, from, to] = [step, low, high].map((number) => this.xOf(series, number));
      return { x, low: from, high: to, before, after, ranks: [series.head.rank] };
    }));
    return mergeChanges(all);
  }
}

/** @param {MergedChange[]} changes @returns {MergedChange[]} */
export function mergeChanges(changes) {
  const merged = /** @type {MergedChange[]} */ ([]);
  for (const change of changes.toSorted((a, b) => a.low - b.low)) {
    const last = merged.at(-1);
    if (!last || change.low > last.high || (change.after > change.before) !== (last.after > last.before)) {
      merged.push({ ...change, ranks: [...change.ranks] });
      continue;
    }
    const many = last.ranks.length;
    const mean = (/** @type {number} */ a, /** @type {number} */ b) => (a * many + b) / (many + 1);
    last.x = mean(last.x, change.x);
    last.before = mean(last.before, change.before);
    last.after = mean(last.after, change.after);
    last.high = Math.max(last.high, change.high);
    last.ranks.push(...change.ranks);
  }
  return merged;
}
