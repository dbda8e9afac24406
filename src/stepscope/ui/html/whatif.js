// What if: every position of the controls is a cell that was predicted beforehand; workers, links and
// buckets are put into the cell's outline here.

const WhatIf = (() => {
  const ALONE = 0.92; // whoever needs this much of the step alone decides it
  const WORTH = 0.02;
  const NARROWEST = 0.01;
  const { figures, ms, times, percent } = WhatIfCharts;

  class Page {
    constructor(root, data) {
      this.root = root;
      this.data = data;
      this.form = root.querySelector("form");
      this.crew = null;
      this.axes = [...data.axes, ...data.crewAxes];
      this.places = this.axes.map((axis) => axis.now);
      this.strides = data.axes.map((_, i) => data.axes.slice(i + 1).reduce((n, a) => n * a.labels.length, 1));
      this.form.addEventListener("input", () => this.read());
      this.form.addEventListener("reset", (event) => {
        event.preventDefault();
        this.set([]);
      });
      this.stick();
      this.show();
      this.ready = this.load();
      addEventListener("resize", () => {
        this.stick();
        this.show();
      });
    }

    // Until the outlines are unpacked, workers and links cannot be moved.
    async load() {
      const block = document.querySelector("#whatif-crew");
      if (!block) return;
      try {
        this.crew = new Crew(await Payload.load(block));
      } catch (error) {
        this.why(`This browser could not unpack the report's data (${error.message}).`);
        return;
      }
      this.show();
    }

    // Controls stay in sight beside the charts where all of them fit.
    stick() {
      this.form.classList.toggle("is-sticky", this.form.offsetHeight < innerHeight - 70);
      this.room = this.out("weak")?.clientWidth; // asking makes the browser lay out: not while drawing
    }

    why(words) {
      const place = this.root.querySelector(".wi-why");
      place.hidden = false;
      place.textContent = words;
    }

    out(name) {
      return this.root.querySelector(`[data-out="${name}"]`);
    }

    say(name, words) {
      const place = this.out(name);
      if (place) place.textContent = words;
    }

    parts(axis) {
      return [...this.form.querySelectorAll(`[data-axis="${axis.id}"]`)];
    }

    read() {
      this.axes.forEach((axis, i) => {
        const parts = this.parts(axis);
        const [part] = parts;
        if (part.type === "radio") this.places[i] = Number(parts.find((each) => each.checked).value);
        else this.places[i] = part.type === "checkbox" ? Number(part.checked) : Number(part.value);
      });
      this.show();
    }

    // The controls as these settings want them, all others as now.
    set(settings) {
      this.axes.forEach((axis, i) => {
        const found = axis.settings.findIndex((each) => each && settings.some((wanted) => asks(wanted, each)));
        const place = found >= 0 ? found : axis.now;
        this.parts(axis).forEach((part) => {
          if (part.type === "radio") part.checked = Number(part.value) === place;
          else if (part.type === "checkbox") part.checked = place === 1;
          else part.value = place;
        });
        this.places[i] = place;
      });
      this.show();
    }

    place(id) {
      return this.axes.findIndex((axis) => axis.id === id);
    }

    // The same places with one control elsewhere.
    with(id, value, places = this.places) {
      const found = places.slice();
      const at = this.place(id);
      if (at >= 0) found[at] = value;
      return found;
    }

    index(places) {
      return this.strides.reduce((sum, stride, i) => sum + places[i] * stride, 0);
    }

    setting(id, places) {
      const at = this.place(id);
      return at < 0 ? "" : this.axes[at].settings[places[at]];
    }

    plan(places) {
      const link = places[this.place("workers")];
      const strong = Boolean(places[this.place("share")]) && link !== this.crew.now;
      if (this.crew.data.links[link].ranks < 2) return { link, way: 0, bandwidth: 1, strong };
      const value = (id) => Number(this.setting(id, places).split("=")[1] || 0);
      const way = this.crew.data.ways.findIndex((each) => each.bucket_mb === (value("bucket-mb") || null));
      return { link, way: Math.max(0, way), bandwidth: value("bandwidth") || 1, strong };
    }

    // All numbers for these places of the controls.
    state(places) {
      const at = this.index(places);
      const cell = Object.fromEntries(Object.entries(this.data.cells).map(([name, column]) => [name, column[at]]));
      const found = { ...cell, comm: 0, exposed: 0, efficiency: 1 };
      if (!this.crew || cell.step === null || !this.crew.data.cells[at]) return found;
      const plan = this.plan(places);
      if (this.crew.sketch(at, plan) === null) return { ...found, step: null };
      const bare = this.index(this.with("cuda-graphs", 0, places));
      const then = this.crew.predict(at, bare, plan);
      Object.assign(found, { comm: then.comm / 1e6, exposed: then.exposed / 1e6 });
      if (this.crew.changes(plan).length) Object.assign(found, this.together(cell, then, plan, places));
      const { links, before } = this.crew.data;
      const ranks = links[plan.link].ranks;
      if (ranks !== before) found.efficiency = (found.factor * before) / ranks / this.state(this.with("workers", this.crew.now, places)).factor;
      return found;
    }

    together(cell, then, plan, places) {
      const { adjusted } = this.crew.data;
      const name = this.settings(places).map((each) => each.split("=")[0]).sort().join("+");
      const [shift, stretch] = adjusted[name] || [0, 0];
      const step = (then.step / 1e6) * Math.exp(shift);
      const far = (ratio) => (stretch ? Math.max(Math.log(ratio), NARROWEST) * stretch : Math.log(ratio));
      const samples = (cell.factor * cell.step) / this.now.step;
      return {
        step,
        low: step * Math.exp(-far(then.step / then.low)),
        high: step * Math.exp(far(then.high / then.step)),
        host: then.host / 1e6,
        device: then.device / 1e6,
        factor: (samples * this.more(plan) * this.now.step) / step,
        ...this.held(cell, plan, places),
      };
    }

    // So many times the samples, for being more workers.
    more({ link, strong }) {
      const { links, before } = this.crew.data;
      return strong ? 1 : links[link].ranks / before;
    }

    // Memory of a worker, with DDP's buckets where the trace has none.
    held(cell, plan, places) {
      const { links, held, cells } = this.crew.data;
      const peaks = plan.strong ? cells[this.index(places)].peaks[plan.link] : cell;
      const more = links[plan.link].ranks > 1 ? held : 0;
      return Object.fromEntries(["peak", "peak_low", "peak_high"].map((name) => [name, peaks && peaks[name] !== null ? peaks[name] + more : null]));
    }

    get now() {
      if (this.kept?.crew !== this.crew) this.kept = { crew: this.crew, now: this.state(this.axes.map((axis) => axis.now)) };
      return this.kept.now;
    }

    get workers() {
      return this.crew ? this.crew.data.links[this.places[this.place("workers")]].ranks : 1;
    }

    // What has an effect: one worker exchanges nothing, and has nobody to share a batch with.
    settings(places = this.places) {
      const alone = this.crew && this.crew.data.links[places[this.place("workers")]].ranks < 2;
      const strong = this.crew && this.plan(places).strong;
      return this.axes
        .map((axis, i) => {
          if (axis.id === "share" || (alone && (axis.id === "bandwidth" || axis.id === "bucket-mb"))) return "";
          return axis.id === "workers" && strong ? `${axis.settings[places[i]]}:strong` : axis.settings[places[i]];
        })
        .filter(Boolean);
    }

    show() {
      const then = this.state(this.places);
      const now = this.now;
      const settings = this.settings();
      this.root.dataset.cell = this.index(this.places);
      this.form.querySelector("[type=reset]").disabled = this.places.every((place, i) => place === this.axes[i].now);
      this.axes.forEach((axis, i) => this.label(axis, this.places[i]));
      const command = ["stepscope whatif", this.data.path, ...settings.map((each) => `--set ${each}`)].join(" ");
      this.say("command", command);
      this.root.querySelector("[data-copy]").dataset.copy = command;
      this.assume(settings, then);
      this.root.classList.toggle("is-unknown", then.step === null);
      if (then.step === null) {
        const refused = this.data.cells.step[this.index(this.places)] === null;
        this.unknown(refused);
        if (!refused) this.curves();
        return;
      }
      this.numbers(now, then, settings);
      this.out("scale").replaceChildren(WhatIfCharts.scale(now, then, settings.length > 0));
      this.out("bars").replaceChildren(WhatIfCharts.bars(now, then, { onHost: this.data.onHost, links: Boolean(this.crew) }));
      this.curves();
    }

    label(axis, place) {
      const output = this.root.querySelector(`[data-output="${axis.id}"]`);
      const [part] = this.parts(axis);
      if (output) {
        output.textContent = axis.labels[place];
        part.setAttribute("aria-valuetext", axis.labels[place]);
      }
      if (axis.why === undefined) return;
      const alone = this.workers < 2 && (axis.id === "bandwidth" || axis.id === "bucket-mb");
      (part.type === "radio" ? part.closest("fieldset") : part).disabled = Boolean(axis.why) || !this.crew || alone;
      const hint = this.root.querySelector(`[data-hint="${axis.id}"]`);
      hint.textContent = !axis.why && this.crew && alone ? "Takes effect from 2 workers on" : hint.dataset.words;
    }

    unknown(refused) {
      this.root.dataset.tone = "none";
      this.say("step", "Not known");
      this.say("interval", refused ? "one of these changes does not go with the others" : "there are fewer samples than workers");
      this.say("verdict", "");
      ["pace", "pace-now", "efficiency", "efficiency-why", "exposed", "exposed-why", "peak", "peak-now", "decides", "decides-why"].forEach((name) => this.say(name, ""));
      ["scale", "bars", "batches", "weak", "strong", "bandwidths", "buckets"].forEach((name) => this.out(name)?.replaceChildren());
    }

    // Samples a second of the whole job, where the batch is known.
    get rate() {
      const { batch } = this.data;
      return batch ? (batch * (this.crew ? this.crew.data.before : 1) * 1000) / this.now.step : 1;
    }

    numbers(now, then, settings) {
      const changed = settings.length > 0;
      const change = 1 - 1 / then.factor;
      this.root.dataset.tone = !changed || Math.abs(change) < WORTH ? "none" : change > 0 ? "good" : "bad";
      this.say("step", ms(then.step));
      this.say("interval", `a step, between ${figures(then.low)} and ${figures(then.high)} with 95%`);
      this.say("verdict", changed ? verdict(now, then) : "The step as it is: move a control");
      const { batch } = this.data;
      this.say("pace", batch ? figures(this.rate * then.factor) : `${times(then.factor)}×`);
      const whose = this.crew ? "of all workers; " : "";
      this.say("pace-now", batch && changed ? `${whose}${figures(this.rate)} now` : batch ? "" : `${whose}over now`);
      this.exchange(then);
      this.memory(now, then, changed);
      const [who, why] = decides(then, this.data.onHost);
      this.say("decides", who);
      this.say("decides-why", why);
    }

    exchange(then) {
      if (!this.crew) return;
      const { before } = this.crew.data;
      const many = this.workers;
      this.say("efficiency", percent(then.efficiency));
      this.say("efficiency-why", many === before ? `of ${many === 1 ? "one worker" : `${many} workers`} as now`
        : `of ${Number((many / before).toFixed(2))} times the throughput of ${before === 1 ? "one worker" : `${before} workers`}`);
      this.say("exposed", many < 2 ? "none" : ms(then.exposed < 0.005 ? 0 : then.exposed));
      this.say("exposed-why", many < 2 ? "one worker exchanges nothing" : `of ${ms(then.comm)} between workers`);
    }

    memory(now, then, changed) {
      if (!this.out("peak")) return;
      const limit = this.data.limit;
      if (then.peak === null) {
        this.say("peak", "not known");
        this.say("peak-now", now.peak === null ? "" : `${Format.bytes(now.peak)} now`);
        this.out("peak").classList.remove("is-beyond");
        return;
      }
      this.say("peak", Format.bytes(then.peak));
      const range = then.peak_high > then.peak_low ? `${Format.bytes(then.peak_low)} to ${Format.bytes(then.peak_high)}; ` : "";
      const beyond = limit && then.peak > limit ? `more than the ${Format.bytes(limit)} there are; ` : "";
      this.say("peak-now", changed && now.peak !== null ? `${beyond}${range}${Format.bytes(now.peak)} now` : beyond);
      this.out("peak").classList.toggle("is-beyond", Boolean(beyond));
    }

    assume(settings, then) {
      const lines = settings.flatMap((each) => this.data.assumptions[each] || []);
      if (this.crew && this.workers > 1 && then.step !== null) {
        const plan = this.plan(this.places);
        const { links, ways, batch } = this.crew.data;
        if (plan.link !== this.crew.now) lines.push(...links[plan.link].said, batch[Number(plan.strong)]);
        const way = ways[plan.way];
        const size = way.size_bytes.reduce((sum, each) => sum + each, 0);
        const many = way.size_bytes.length === 1 ? "1 bucket" : `${way.size_bytes.length} buckets`;
        lines.push(`gradients of ${(size / 1e6).toFixed(1)} MB are summed in ${many}: ${ms(then.comm)}, of which ${ms(then.exposed)} lengthen the step`);
      }
      this.out("assumed-box").hidden = !lines.length;
      this.out("assumed").replaceChildren(...lines.map((line) => {
        const item = document.createElement("li");
        item.textContent = Format.sentence(line);
        return item;
      }));
    }

    // The step, or the job's throughput, at every position of one control.
    points(id, places = this.places) {
      const at = this.place(id);
      const axis = this.axes[at];
      return axis.labels
        .map((label, i) => ({ label: label.replace(" (now)", "").replace(" MiB", "").replace("as traced", "traced"), now: i === axis.now, chosen: i === places[at], ...this.state(this.with(id, i, places)) }))
        .filter((point) => point.step !== null);
    }

    // Throughput by workers, each with its batch (0) or all with one (1).
    scaling(name, share) {
      const at = this.place("share");
      const why = share ? this.axes[at].why : "";
      const points = why ? [] : this.points("workers", this.with("share", share));
      if (share !== this.places[at]) points.forEach((point) => (point.chosen = false));
      const words = why || (points.length < 2 ? "There are fewer samples than workers." : "");
      this.out(name).replaceChildren(words || WhatIfCharts.scaling(points, this.rate, this.data.batch ? "samples a second" : "times now", this.room));
    }

    curves() {
      if (this.out("batches")) this.out("batches").replaceChildren(WhatIfCharts.curve(this.points("batch"), this.data.batch ? "batch" : "times"));
      if (!this.crew) return;
      this.scaling("weak", 0);
      this.scaling("strong", 1);
      const { links } = this.crew.data;
      const chosen = links[this.places[this.place("workers")]];
      const link = chosen.all_reduce.length ? chosen : links.find((each) => each.all_reduce.length);
      this.say("workers-from", link ? ` Links: ${link.basis}.` : "");
      this.out("links").classList.toggle("is-alone", this.workers < 2);
      this.out("bandwidths").replaceChildren(WhatIfCharts.curve(this.points("bandwidth"), "times"));
      this.out("buckets")?.replaceChildren(WhatIfCharts.curve(this.points("bucket-mb"), "MiB"));
    }
  }

  // `workers=8:strong` asks for eight workers and for one batch among them.
  const asks = (wanted, setting) => (setting === "strong" ? wanted.endsWith(":strong") : wanted.replace(/:strong$/, "") === setting);

  function verdict(now, then) {
    const before = `now ${ms(now.step)}`;
    const change = 1 - 1 / then.factor;
    if (Math.abs(change) < WORTH) return `No real difference (under 2%): ${before}`;
    const samples = (then.factor * then.step) / now.step;
    if (Math.abs(samples - 1) > 0.01) {
      const many = `${Number(samples.toPrecision(3))} ${samples > 1 ? "times" : "of"}`;
      return `${times(then.factor)} times as many samples a second, ${many} the samples a step; ${before}`;
    }
    if (then.factor >= 1.5) return `${times(then.factor)} times faster: ${before}`;
    if (then.factor >= 1) return `${(change * 100).toFixed(0)}% shorter: ${before}`;
    const slower = 1 / then.factor;
    return slower < 2 ? `${((slower - 1) * 100).toFixed(0)}% longer: ${before}` : `${times(slower)} times as long: ${before}`;
  }

  function decides(cell, onHost) {
    const host = figures(cell.host);
    const device = figures(cell.device);
    const both = onHost ? `the host has ${host} ms of work` : `the host has ${host} ms of work, the device ${device}`;
    if (cell.exposed > (1 - ALONE) * cell.step) return ["the links", `nothing hides ${ms(cell.exposed)} of them; ${both}`];
    if (onHost) return ["the host", `it has ${host} ms of work; there is no device`];
    if (Math.max(cell.host, cell.device) < ALONE * cell.step) return ["neither alone", `they wait for each other: ${both}`];
    return cell.device >= cell.host
      ? ["the device", `it has ${device} ms of work, the host ${host}`]
      : ["the host", `it has ${host} ms of work, the device ${device}`];
  }

  function start() {
    const root = document.querySelector("[data-wi]");
    if (!root) return null;
    const page = new Page(root, JSON.parse(document.querySelector("#whatif-data").textContent));
    document.querySelectorAll("[data-wi-set]").forEach((button) =>
      button.addEventListener("click", () => {
        page.set([button.dataset.wiSet]);
        root.scrollIntoView({ block: "nearest" });
      }));
    return page;
  }

  return { start, figures };
})();
