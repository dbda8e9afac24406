// A step with other workers, links and buckets, computed from tables of when what follows what
// (predict/max_plus.py). Times are ns. tests/scaled_step.py computes the same.

const STEPS = 4;
const NORMAL_95 = 1.96; // standard deviations on each side hold 95%

const sum = (/** @type {number[]} */ list) => list.reduce((all, value) => all + value, 0);
const logRatio = (/** @type {number} */ after, /** @type {number} */ before) => Math.abs(Math.log(Math.max(after, 1) / Math.max(before, 1)));
const steady = (/** @type {number[]} */ ends) => (ends[STEPS - 1] - ends[STEPS / 2 - 1]) / (STEPS / 2);

/** @param {CostLine[]} lines @param {number} size @param {number} bandwidth */
export function transferCost(lines, size, bandwidth) {
  const [, alpha, beta] = lines.find(([upTo]) => size <= upTo) ?? lines[lines.length - 1];
  return alpha + (beta * size) / bandwidth;
}

// Where processors are shared, a sum next to compute lasts longer, and compute loses time to it.
/** How long each sum lasts, and what compute loses to it. @param {number[]} ready @param {number} computeEnd @param {number[]} alone @param {number[]} beside @param {number} share */
export function chainSums(ready, computeEnd, alone, beside, share) {
  const lasting = alone.slice();
  let taken = alone.map(() => 0);
  let lost = taken;
  for (let pass = 0; pass < 100; pass++) {
    let [end, spent] = [0, 0];
    const until = computeEnd + sum(taken);
    lost = alone.map((own, i) => {
      const start = Math.max(ready[i] + spent, end);
      const room = Math.max(0, until - start);
      const part = beside[i] > 0 ? Math.min(1, room / beside[i]) : 1;
      lasting[i] = part * beside[i] + (1 - part) * own;
      end = start + lasting[i];
      spent += share * own * part;
      return share * own * part;
    });
    if (lost.every((ns, i) => Math.abs(ns - taken[i]) < 1)) break;
    taken = taken.map((ns, i) => (ns + lost[i]) / 2);
  }
  return [lasting, lost];
}

/** The steps one after the other; `between` changes the times after each stretch. @param {Tables} tables @param {(now: Float64Array, stretch: number) => void} between */
export function replay({ times, stretches }, between) {
  let [now, next] = [new Float64Array(times), new Float64Array(times)];
  const ends = [];
  for (let step = 0; step < STEPS; step++) {
    stretches.forEach((table, k) => {
      for (let to = 0, place = 0; to < times; to++) {
        let latest = -Infinity;
        for (let from = 0; from < times; from++, place++) {
          const value = table[place] + now[from];
          if (value > latest) latest = value;
        }
        next[to] = latest;
      }
      [now, next] = [next, now];
      between(now, k);
    });
    ends.push(Math.max(...now));
  }
  return ends;
}

/** A step with other workers in ms, moved and widened by what became of earlier predictions. @param {{ step: number, low: number, high: number }} then in ns @param {[number, number]} lesson shift and stretch @param {number} narrowest */
export function adjustedStep(then, [shift, stretch], narrowest) {
  const step = (then.step / 1e6) * Math.exp(shift);
  const far = (/** @type {number} */ ratio) => (stretch ? Math.max(Math.log(ratio), narrowest) * stretch : Math.log(ratio));
  return { step, low: step * Math.exp(-far(then.step / then.low)), high: step * Math.exp(far(then.high / then.step)) };
}

export class ScaledStep {
  constructor(/** @type {ScalingData} */ data) {
    this.data = data;
    this.now = data.links.findIndex((link) => link.ranks === data.before);
    this.known = /** @type {Map<string, any>} */ (new Map());
  }

  /** @template T @param {string} key @param {() => T} compute @returns {T} */
  once(key, compute) {
    if (!this.known.has(key)) this.known.set(key, compute());
    return this.known.get(key);
  }

  /** A step's tables for a worker `pace` times as slow. @param {number} at place of the step @param {ShapeName} name @param {number} pace @returns {Tables} */
  tables(at, name, pace) { return this.once(`${at} ${name} ${pace}`, () => this.readTables(at, name, pace)); }

  /** @param {number} at @param {ShapeName} name @param {number} pace @returns {Tables} */
  readTables(at, name, pace) {
    const { unit, columns, shapes } = this.data;
    const { times, stretches, sloped } = shapes[name];
    const { own } = this.shape(at, name);
    const tables = Array.from({ length: stretches }, () => new Float64Array(times * times).fill(-Infinity));
    for (let to = 0; to < times; to++) {
      for (let from = 0; from < times; from++) {
        const base = columns[`${name}-tables-${to}-${from}`];
        const slope = sloped ? columns[`${name}-slope-${to}-${from}`] : null;
        for (let k = 0; k < stretches; k++) {
          const value = base[at * stretches + k];
          if (!value) continue;
          const more = slope ? slope[at * stretches + k] - 1 : (value - 1) * (own[from] ?? 1);
          tables[k][to * times + from] = (value - 1 + (pace - 1) * Math.max(0, more)) * unit;
        }
      }
    }
    return { times, stretches: tables };
  }

  shape(/** @type {number} */ at, /** @type {ShapeName} */ name) { return /** @type {Shape} */ (this.data.steps[at][name]); }

  /** @param {number} at @param {Plan} plan @param {{ pace?: number, factor?: number }} changes the slowest worker's pace, and how much longer transfers take @returns {Replayed} */
  run(at, plan, { pace = this.data.links[plan.link].straggling, factor = 1 } = {}) {
    const key = [at, plan.link, plan.buckets, factor ? plan.bandwidth : 1, pace, factor].join();
    const traced = this.data.steps[at].traced && !plan.buckets;
    return this.once(key, () => (traced ? this.runTraced(at, plan, pace, factor) : this.runPlanned(at, plan, pace, factor)));
  }

  /** @param {number} at @param {ShapeName} name @param {number} pace */
  hostTime(at, name, pace) { return this.shape(at, name).host * (this.data.steps[at].task === null ? pace : 1); }

  /** @param {number} at @param {ShapeName} name @param {number} pace */
  busyTimes(at, name, pace) {
    const { busy, own } = this.shape(at, name);
    return busy.map((ns, i) => ns * (1 + (pace - 1) * own[1 + i]));
  }

  /** The trace's own collectives with other durations. @param {number} at @param {Plan} plan @param {number} pace @param {number} factor @returns {Replayed} */
  runTraced(at, plan, pace, factor) {
    const { wait, share } = this.data.steps[at];
    const { all_reduce: lines } = this.data.links[plan.link];
    const { size_bytes, carried_bytes } = this.data.buckets[0];
    const sizes = carried_bytes.length ? carried_bytes : size_bytes;
    const { marked } = this.shape(at, "traced");
    const lasting = marked.map((_, i) => (lines.length && factor
      ? wait[i] + share[i] * factor * transferCost(lines, sizes[i], plan.bandwidth) : 0));
    const ends = replay(this.tables(at, "traced", pace), (now, k) => {
      if (k < marked.length) marked[k].forEach((place) => { now[place] += lasting[k]; });
    });
    const busy = this.busyTimes(at, "traced", pace);
    marked.forEach((places, i) => { busy[places[0] - 1] += lasting[i]; });
    return { step: steady(ends), host: this.hostTime(at, "traced", pace), device: Math.max(0, ...busy), comm: sum(lasting) };
  }

  /** Collectives inserted between the stretches. @param {number} at @param {Plan} plan @param {number} pace @param {number} factor @returns {Replayed} */
  runPlanned(at, plan, pace, factor) {
    const { onHost, moments, forward } = this.data;
    const { compute, task, waiting } = this.data.steps[at];
    const link = this.data.links[plan.link];
    const buckets = this.data.buckets[plan.buckets];
    const tables = this.tables(at, "planned", pace);
    const busy = this.busyTimes(at, "planned", pace);
    const hostAlone = this.hostTime(at, "planned", pace);
    if (!link.all_reduce.length) {
      return { step: steady(replay(tables, () => {})), host: hostAlone, device: Math.max(0, ...busy), comm: 0 };
    }
    const pays = task === null; // inside a CUDA graph the host pays nothing
    const filled = sum(buckets.fill_ns);
    const toll = buckets.host_ns.map((ns, i) => ns + (onHost ? buckets.fill_ns[i] : 0));
    const costs = (/** @type {CostLine[]} */ lines, /** @type {number[]} */ sizes) =>
      sizes.map((size) => factor * transferCost(lines, size, plan.bandwidth));
    let lasting = costs(link.all_reduce, buckets.size_bytes);
    let lost = lasting.map(() => 0);
    if (link.beside.length && factor) {
      const beside = costs(link.beside, buckets.size_bytes).map((cost, i) => Math.max(lasting[i], cost));
      [lasting, lost] = this.contended(tables, buckets.marks, toll, lasting, beside, link.lost);
    }
    if (factor) lasting = lasting.map((ns) => ns + waiting / lasting.length);
    const host = toll.map((ns) => (pays ? ns : 0));
    const sent = costs(link.broadcast, this.data.sent);
    const [send, afterSend] = pays ? [this.data.send, this.data.afterSend] : [0, 0];
    const finish = (pays ? this.data.finish : 0) + (onHost ? filled : 0);
    const ready = Array.from({ length: moments }, () => /** @type {number[]} */ ([]));
    buckets.marks.forEach((moment, i) => ready[moment].push(i));
    let comm = 0;
    const waitForSums = (/** @type {Float64Array} */ now, /** @type {number} */ hostTime, /** @type {number} */ deviceTime) => {
      if (onHost) {
        now[0] = Math.max(now[0], comm) + hostTime;
      } else {
        now[0] += hostTime;
        now[compute] = Math.max(now[0], now[compute], comm) + deviceTime;
      }
    };
    const commEnds = /** @type {number[]} */ ([]);
    const ends = replay(tables, (now, k) => {
      if (k === forward && sent.length) {
        sent.forEach((cost) => {
          now[0] += send;
          comm = Math.max(comm, now[0]) + cost;
        });
        waitForSums(now, afterSend, 0);
      }
      (ready[k] ?? []).forEach((i) => {
        if (!onHost && buckets.fill_ns[i]) now[compute] = Math.max(now[compute], now[0]) + buckets.fill_ns[i];
        now[0] += host[i];
        comm = Math.max(now[0], comm, onHost ? 0 : now[compute]) + lasting[i];
        now[0] += lost[i];
      });
      if (k === moments - 1) waitForSums(now, finish, onHost ? 0 : filled);
      if (k === tables.stretches.length - 1) commEnds.push(comm);
    });
    const total = sum(lasting) + sum(sent);
    if (!onHost) busy[compute - 1] += 2 * filled;
    const tasks = lasting.length + (filled ? lasting.length : 0) + 1 + (sent.length ? sent.length + 1 : 0);
    const spent = sum(host) + sum(lost) + finish + (sent.length ? send * sent.length + afterSend : 0);
    return {
      step: steady(ends.map((end, i) => Math.max(end, commEnds[i]))),
      host: hostAlone + spent + (task ?? 0) * tasks,
      device: Math.max(total, ...busy),
      comm: total,
    };
  }

  /** @param {Tables} tables @param {number[]} marks @param {number[]} toll @param {number[]} alone @param {number[]} beside @param {number} share */
  contended(tables, marks, toll, alone, beside, share) {
    const hostAt = /** @type {number[]} */ ([]);
    replay(tables, (now) => hostAt.push(now[0])); // the first step's come first
    let spent = 0;
    const begun = marks.map((moment, i) => hostAt[moment] + (spent += toll[i]));
    return chainSums(begun, hostAt[this.data.moments - 1] + spent, alone, beside, share);
  }

  /** Which step a cell's is: its own, or that of a share of the batch; null where there are too few samples. @param {number} cell @param {Plan} plan */
  stepOf(cell, { link, strong }) {
    const known = /** @type {Cell} */ (this.data.cells[cell]);
    return strong ? known.shared[link] : known.step;
  }

  /** The step, its interval and its exposed communication; `bare` is the cell before a CUDA graph is made of it, for the exchange comes between. @param {number} cell @param {number} bare @param {Plan} plan */
  predict(cell, bare, plan) {
    const key = `${cell} with ${plan.link} ${plan.buckets} ${plan.bandwidth} ${plan.strong}`;
    return this.once(key, () => this.predictCell(cell, bare, plan));
  }

  /** @param {number} cell @param {number} bare @param {Plan} plan */
  predictCell(cell, bare, plan) {
    const { doubts, cells } = this.data;
    const known = /** @type {Cell} */ (cells[bare]);
    const at = /** @type {number} */ (this.stepOf(bare, plan));
    let { ns: step, variance } = known;
    let done = this.run(at, plan);
    this.changes(plan).forEach((change, i) => {
      done = this.run(at, change);
      variance += (doubts.change * logRatio(done.step, step)) ** 2;
      if (!i) variance += this.doubtOfLinks(at, change, done) ** 2;
      if (!i && plan.strong) variance += this.doubtOfShare(known.step, at, done) ** 2;
      step = done.step;
    });
    let without = this.withoutTransfers(at, plan);
    const least = plan.strong ? 0 : this.leastStep(at, plan, done, without);
    if (cell !== bare) {
      const graphed = /** @type {number} */ (this.stepOf(cell, plan));
      done = this.run(graphed, plan);
      without = this.withoutTransfers(graphed, plan);
      const moved = logRatio(done.step, step);
      const { spread } = /** @type {Cell} */ (cells[cell]);
      variance += (spread * Math.min(1, moved)) ** 2 + (doubts.change * moved) ** 2;
    }
    const host = doubts.host * Math.min(1, done.host / done.step) ** 4;
    const [stalls, doubt] = this.stalls(cell, plan);
    const whole = done.step + stalls;
    const share = done.step / whole;
    const half = NORMAL_95 * Math.sqrt(share ** 2 * (host ** 2 + variance) + (doubt / whole) ** 2 + doubts.least ** 2);
    const low = whole * Math.exp(-half);
    return {
      ...done,
      step: whole,
      stalls,
      low: least < done.step ? Math.max(low, least + Math.max(0, stalls - NORMAL_95 * doubt)) : low,
      high: whole * Math.exp(half),
      exposed: Math.max(0, done.step - without),
    };
  }

  /** What stalls add to an average step of so many workers. @param {number} cell @param {Plan} plan @returns {Stalled} */
  stalls(cell, { link, strong }) {
    return /** @type {Cell} */ (this.data.cells[cell]).stalls[link]?.[Number(strong)] ?? [0, 0];
  }

  /** Workers, then buckets, then links; what is as now is no change. @param {Plan} plan @returns {Plan[]} */
  changes({ link, buckets, bandwidth, strong }) {
    const changes = [];
    if (link !== this.now) changes.push({ link, buckets: 0, bandwidth: 1, strong });
    if (buckets) changes.push({ link, buckets, bandwidth: 1, strong });
    if (bandwidth !== 1) changes.push({ link, buckets, bandwidth, strong });
    return changes;
  }

  /** @param {number} at @param {Plan} plan @param {Replayed} done */
  doubtOfLinks(at, plan, done) {
    const { doubts } = this.data;
    const link = this.data.links[plan.link];
    if (!link.all_reduce.length) return 0;
    const off = Math.exp(NORMAL_95 * link.spread);
    const [low, high] = [1 / off, off].map((factor) => this.run(at, plan, { factor }).step);
    const usual = link.straggling === 1 ? done.step : this.run(at, plan, { pace: 1 }).step;
    return Math.hypot(logRatio(high, low) / (2 * NORMAL_95), doubts.straggling * logRatio(done.step, usual), doubts.model);
  }

  /** The step if no collective took any time. @param {number} at @param {Plan} plan */
  withoutTransfers(at, plan) {
    const { traced, quiet, silent } = this.data.steps[at];
    const known = plan.buckets ? quiet : silent;
    if (traced && known !== null) return this.data.links[plan.link].straggling * known;
    return this.run(at, plan, { factor: 0 }).step;
  }

  /** Doubt about what a share of the batch takes away from a worker's own time. @param {number} whole @param {number} at @param {Replayed} done */
  doubtOfShare(whole, at, done) {
    const own = this.ownTime(at);
    return this.data.doubts.share * Math.min(1, logRatio(this.ownTime(whole), own)) * Math.min(1, own / done.step);
  }

  /** What a worker needs by itself. @param {number} at */
  ownTime(at) {
    const { traced, silent } = this.data.steps[at];
    return traced ? silent : this.alone(at);
  }

  alone(/** @type {number} */ at) {
    return this.once(`${at} alone`, () => steady(replay(this.tables(at, "planned", 1), () => {})));
  }

  /** No link makes the step shorter than what a worker needs by itself. @param {number} at @param {Plan} plan @param {Replayed} done @param {number} without */
  leastStep(at, plan, done, without) {
    const { reached, low_end: lowEnd } = this.data.doubts;
    const { planned, traced } = this.data.steps[at];
    const own = planned && (!traced || plan.buckets) ? Math.min(without, this.alone(at)) : without;
    return reached * lowEnd * Math.min(done.step, own);
  }
}
