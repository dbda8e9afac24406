// A step with so many workers, such links and such buckets, from its outline; predict/scaled_step.py
// in the reader's browser. Times are ns. A plan is { link, way, bandwidth, strong }: places in the
// lists, and whether workers share one batch. `at` is a place among the sketches.

const Crew = (() => {
  const STEPS = 4;
  const sum = (list) => list.reduce((all, each) => all + each, 0);
  const ratio = (after, before) => Math.abs(Math.log(Math.max(after, 1) / Math.max(before, 1)));
  const steady = (ends) => (ends[STEPS - 1] - ends[STEPS / 2 - 1]) / (STEPS / 2);

  function cost(lines, size, bandwidth) {
    const line = lines.find((each, i) => i === lines.length - 1 || size <= each[0]);
    return line[1] + (line[2] * size) / bandwidth;
  }

  // Where processors are shared a sum beside compute lasts longer, and compute loses time to it.
  function chain(ready, computeEnd, alone, beside, share) {
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
      if (lost.every((each, i) => Math.abs(each - taken[i]) < 1)) break;
      taken = taken.map((each, i) => (each + lost[i]) / 2);
    }
    return [lasting, lost];
  }

  class Crew {
    constructor(data) {
      this.data = data;
      this.now = data.links.findIndex((link) => link.ranks === data.before);
      this.known = new Map();
    }

    // A sketch's tables for a worker so many times as slow: [stretch][to * times + from].
    tables(at, name, pace) {
      return this.once(`${at} ${name} ${pace}`, () => this.unfold(at, name, pace));
    }

    unfold(at, name, pace) {
      const { unit, columns, shapes, sketches } = this.data;
      const { times, stretches, sloped } = shapes[name];
      const own = sketches[at][name].own;
      const found = Array.from({ length: stretches }, () => new Float64Array(times * times).fill(-Infinity));
      for (let to = 0; to < times; to++) {
        for (let from = 0; from < times; from++) {
          const base = columns[`${name}-tables-${to}-${from}`];
          const slope = sloped ? columns[`${name}-slope-${to}-${from}`] : null;
          for (let k = 0; k < stretches; k++) {
            const value = base[at * stretches + k];
            if (!value) continue;
            const more = slope ? slope[at * stretches + k] - 1 : (value - 1) * (own[from] ?? 1);
            found[k][to * times + from] = (value - 1 + (pace - 1) * Math.max(0, more)) * unit;
          }
        }
      }
      return { times, found };
    }

    run(at, plan, { slower = null, times = 1 } = {}) {
      const pace = slower ?? this.data.links[plan.link].straggling;
      const key = [at, plan.link, plan.way, times ? plan.bandwidth : 1, pace, times].join();
      const traced = this.data.sketches[at].traced && !plan.way;
      return this.once(key, () => (traced ? this.retimed(at, plan, pace, times) : this.planned(at, plan, pace, times)));
    }

    once(key, find) {
      if (!this.known.has(key)) this.known.set(key, find());
      return this.known.get(key);
    }

    // The steps one after the other; `meet` is what happens between two stretches.
    replay({ times, found }, meet) {
      let [now, then] = [new Float64Array(times), new Float64Array(times)];
      const ends = [];
      for (let step = 0; step < STEPS; step++) {
        for (let k = 0; k < found.length; k++) {
          const table = found[k];
          for (let to = 0, place = 0; to < times; to++) {
            let latest = -Infinity;
            for (let from = 0; from < times; from++, place++) {
              const value = table[place] + now[from];
              if (value > latest) latest = value;
            }
            then[to] = latest;
          }
          [now, then] = [then, now];
          meet(now, k);
        }
        ends.push(Math.max(...now));
      }
      return ends;
    }

    host(at, name, pace) {
      const cell = this.data.sketches[at];
      return cell[name].host * (cell.task === null ? pace : 1);
    }

    busy(at, name, pace) {
      const shape = this.data.sketches[at][name];
      return shape.busy.map((each, i) => each * (1 + (pace - 1) * shape.own[1 + i]));
    }

    retimed(at, plan, pace, times) {
      const cell = this.data.sketches[at];
      const link = this.data.links[plan.link];
      const sizes = this.data.ways[0].size_bytes;
      const marked = cell.traced.marked;
      const lasting = marked.map((_, i) => (link.all_reduce.length && times
        ? cell.wait[i] + cell.share[i] * times * cost(link.all_reduce, sizes[i], plan.bandwidth) : 0));
      const ends = this.replay(this.tables(at, "traced", pace), (now, k) => {
        if (k < marked.length) marked[k].forEach((place) => (now[place] += lasting[k]));
      });
      const busy = this.busy(at, "traced", pace);
      marked.forEach((places, i) => (busy[places[0] - 1] += lasting[i]));
      return { step: steady(ends), host: this.host(at, "traced", pace), device: Math.max(0, ...busy), comm: sum(lasting) };
    }

    planned(at, plan, pace, times) {
      const { onHost, moments, forward } = this.data;
      const cell = this.data.sketches[at];
      const link = this.data.links[plan.link];
      const way = this.data.ways[plan.way];
      const shape = this.tables(at, "planned", pace);
      const busy = this.busy(at, "planned", pace);
      const base = this.host(at, "planned", pace);
      if (!link.all_reduce.length) {
        const ends = this.replay(shape, () => {});
        return { step: steady(ends), host: base, device: Math.max(0, ...busy), comm: 0 };
      }
      const pays = cell.task === null; // inside a CUDA graph nobody pays the host
      const filled = sum(way.fill_ns);
      const toll = way.host_ns.map((each, i) => each + (onHost ? way.fill_ns[i] : 0));
      let lasting = way.size_bytes.map((size) => times * cost(link.all_reduce, size, plan.bandwidth));
      let lost = lasting.map(() => 0);
      if (link.beside.length && times) [lasting, lost] = this.contended(shape, link, way, toll, plan.bandwidth, times);
      if (times) lasting = lasting.map((each) => each + cell.waiting / lasting.length);
      const host = toll.map((each) => (pays ? each : 0));
      const sent = this.data.sent.map((size) => times * cost(link.broadcast, size, plan.bandwidth));
      const [send, behind] = pays ? [this.data.send, this.data.behind] : [0, 0];
      const finish = (pays ? this.data.finish : 0) + (onHost ? filled : 0);
      const ready = Array.from({ length: moments }, () => []);
      way.marks.forEach((moment, i) => ready[moment].push(i));
      let comm = 0;
      const wait = (now, hostTime, deviceTime) => {
        if (onHost) {
          now[0] = Math.max(now[0], comm) + hostTime;
        } else {
          now[0] += hostTime;
          now[cell.compute] = Math.max(now[0], now[cell.compute], comm) + deviceTime;
        }
      };
      const ends = [];
      const lanes = this.replay(shape, (now, k) => {
        if (k === forward && sent.length) {
          sent.forEach((each) => {
            now[0] += send;
            comm = Math.max(comm, now[0]) + each;
          });
          wait(now, behind, 0);
        }
        (ready[k] || []).forEach((i) => {
          if (!onHost && way.fill_ns[i]) now[cell.compute] = Math.max(now[cell.compute], now[0]) + way.fill_ns[i];
          now[0] += host[i];
          comm = Math.max(now[0], comm, onHost ? 0 : now[cell.compute]) + lasting[i];
          now[0] += lost[i];
        });
        if (k === moments - 1) wait(now, finish, onHost ? 0 : filled);
        if (k === shape.found.length - 1) ends.push(comm);
      });
      const total = sum(lasting) + sum(sent);
      if (!onHost) busy[cell.compute - 1] += 2 * filled;
      const more = lasting.length + (filled ? lasting.length : 0) + 1 + (sent.length ? sent.length + 1 : 0);
      const spent = sum(host) + sum(lost) + finish + (sent.length ? send * sent.length + behind : 0);
      return {
        step: steady(lanes.map((end, i) => Math.max(end, ends[i]))),
        host: base + spent + (pays ? 0 : cell.task * more),
        device: Math.max(total, ...busy),
        comm: total,
      };
    }

    contended({ times, found }, link, way, toll, bandwidth, factor) {
      const ended = [];
      this.replay({ times, found }, (now) => ended.push(now[0])); // of the first step
      let spent = 0;
      const begun = way.marks.map((moment, i) => ended[moment] + (spent += toll[i]));
      const alone = way.size_bytes.map((size) => factor * cost(link.all_reduce, size, bandwidth));
      const beside = way.size_bytes.map((size, i) => Math.max(alone[i], factor * cost(link.beside, size, bandwidth)));
      return chain(begun, ended[this.data.moments - 1] + spent, alone, beside, link.lost);
    }

    // Which sketch a cell's step is: its own, or that of a share of the batch.
    sketch(cell, { link, strong }) {
      return strong ? this.data.cells[cell].shared[link] : this.data.cells[cell].sketch;
    }

    // The step, its interval and what of it is the exchange, of a cell; `bare` is the same one before
    // a CUDA graph is made of it: the exchange comes between.
    predict(cell, bare, plan) {
      return this.once(`${cell} with ${plan.link} ${plan.way} ${plan.bandwidth} ${plan.strong}`, () => this.together(cell, bare, plan));
    }

    together(cell, bare, plan) {
      const { doubts, cells } = this.data;
      const at = this.sketch(bare, plan);
      let { step, variance } = cells[bare];
      let done = null;
      this.changes(plan).forEach((each, i) => {
        done = this.run(at, each);
        variance += (doubts.of_change * ratio(done.step, step)) ** 2;
        if (!i) variance += this.doubt(at, each, done) ** 2;
        if (!i && plan.strong) variance += this.doubtOfShare(cells[bare].sketch, at, done) ** 2;
        step = done.step;
      });
      if (!done) done = this.run(at, plan);
      let without = this.without(at, plan);
      const least = plan.strong ? 0 : this.least(at, plan, done, without);
      if (cell !== bare) {
        const graphed = this.sketch(cell, plan);
        done = this.run(graphed, plan);
        without = this.without(graphed, plan);
        const moved = ratio(done.step, step);
        variance += (cells[cell].spread * Math.min(1, moved)) ** 2 + (doubts.of_change * moved) ** 2;
      }
      const host = doubts.of_host * Math.min(1, done.host / done.step) ** 4;
      const half = 1.96 * Math.sqrt(host ** 2 + variance + doubts.least ** 2);
      const low = done.step * Math.exp(-half);
      return {
        ...done,
        low: least < done.step ? Math.max(low, least) : low,
        high: done.step * Math.exp(half),
        exposed: Math.max(0, done.step - without),
      };
    }

    // Workers, then buckets, then links; what is as now is no change.
    changes({ link, way, bandwidth }) {
      const found = [];
      if (link !== this.now) found.push({ link, way: 0, bandwidth: 1 });
      if (way) found.push({ link, way, bandwidth: 1 });
      if (bandwidth !== 1) found.push({ link, way, bandwidth });
      return found;
    }

    doubt(at, plan, done) {
      const doubts = this.data.doubts;
      const link = this.data.links[plan.link];
      if (!link.all_reduce.length) return 0;
      const factor = Math.exp(1.96 * link.spread);
      const [low, high] = [1 / factor, factor].map((times) => this.run(at, plan, { times }).step);
      const usual = link.straggling === 1 ? done.step : this.run(at, plan, { slower: 1 }).step;
      return Math.hypot(ratio(high, low) / (2 * 1.96), doubts.of_straggling * ratio(done.step, usual), doubts.of_model);
    }

    // If no collective took any time.
    without(at, plan) {
      const cell = this.data.sketches[at];
      const silent = plan.way ? cell.quiet : cell.silent;
      if (cell.traced && silent !== null) return this.data.links[plan.link].straggling * silent;
      return this.run(at, plan, { times: 0 }).step;
    }

    // Of what a share of the batch takes away from a worker's own time.
    doubtOfShare(whole, at, done) {
      const own = this.own(at);
      return this.data.ofShare * Math.min(1, ratio(this.own(whole), own)) * Math.min(1, own / done.step);
    }

    // What a worker needs by itself.
    own(at) {
      const { traced, silent } = this.data.sketches[at];
      return traced ? silent : this.alone(at);
    }

    alone(at) {
      return this.once(`${at} alone`, () => steady(this.replay(this.tables(at, "planned", 1), () => {})));
    }

    // No link makes the step shorter than what a worker needs by itself.
    least(at, plan, done, without) {
      const { reached, lowest } = this.data.doubts;
      const cell = this.data.sketches[at];
      let own = without;
      if (cell.planned && (!cell.traced || plan.way)) {
        own = Math.min(own, this.alone(at));
      }
      return reached * lowest * Math.min(done.step, own);
    }
  }

  return Crew;
})();
