// The pane "What if": every position of the controls is a cell that was predicted beforehand; workers,
// links and buckets are added to the cell's step here.

import { element, inputIn, partIn, partsIn } from "./dom.js";
import { counted, factor, milliseconds, percent, sentence, significant, size } from "./format.js";
import { decodeBlock, unpackProblem } from "./payload.js";
import { registerPane } from "./registry.js";
import { adjustedStep, ScaledStep } from "./scaled_step.js";
import { drawBars, drawCurve, drawInterval, drawScaling } from "./whatif_charts.js";
import { bottleneck, verdict } from "./whatif_words.js";

/** `workers=8:strong` asks for eight workers and for one batch among them. @param {string} wanted @param {string} setting */
const asksFor = (wanted, setting) => (setting === "strong" ? wanted.endsWith(":strong") : wanted.replace(/:strong$/, "") === setting);

export class WhatIf {
  /** @param {HTMLElement} root @param {WhatIfData} data */
  constructor(root, data) {
    this.root = root;
    this.data = data;
    this.form = partIn(root, "form");
    this.scaling = /** @type {ScaledStep | null} */ (null);
    this.axes = [...data.axes, ...data.scalingAxes];
    /** Position of each control. */
    this.places = this.axes.map((axis) => axis.now);
    this.strides = data.axes.map((_, i) => data.axes.slice(i + 1).reduce((cells, axis) => cells * axis.labels.length, 1));
    this.form.addEventListener("input", () => this.read());
    this.form.addEventListener("reset", (event) => {
      event.preventDefault();
      this.set([]);
    });
    this.room = 0;
    this.now = this.stateNow();
    this.fitWindow();
    this.ready = this.load();
    addEventListener("resize", () => this.fitWindow());
  }

  /** Until the steps' tables are unpacked, workers and links cannot be moved. */
  async load() {
    const block = document.querySelector("#whatif-scaling");
    if (!block) return;
    try {
      this.scaling = new ScaledStep(await decodeBlock(block.textContent ?? ""));
    } catch (error) {
      const why = partIn(this.root, ".wi-why");
      why.hidden = false;
      why.textContent = unpackProblem(error);
      return;
    }
    this.now = this.stateNow();
    this.show();
  }

  stateNow() { return /** @type {Predicted} */ (this.state(this.axes.map((axis) => axis.now))); }

  /** Controls stay in sight next to the charts where all of them fit. */
  fitWindow() {
    this.form.classList.toggle("is-sticky", this.form.offsetHeight < innerHeight - 70);
    this.room = this.out("weak")?.clientWidth ?? 0; // asking makes the browser lay out: not while drawing
    this.show();
  }

  // ---- the controls

  inputs(/** @type {Axis} */ axis) {
    return /** @type {HTMLInputElement[]} */ (partsIn(this.form, `[data-axis="${axis.id}"]`));
  }

  read() {
    this.places = this.axes.map((axis) => {
      const inputs = this.inputs(axis);
      const [input] = inputs;
      if (input.type === "radio") return Number(inputs.find(({ checked }) => checked)?.value);
      return input.type === "checkbox" ? Number(input.checked) : Number(input.value);
    });
    this.show();
  }

  /** Moves the controls to these settings, all others to now. @param {string[]} settings */
  set(settings) {
    this.places = this.axes.map((axis) => {
      const wanted = axis.settings.findIndex((setting) => setting && settings.some((wish) => asksFor(wish, setting)));
      const place = wanted >= 0 ? wanted : axis.now;
      this.inputs(axis).forEach((input) => {
        if (input.type === "radio") input.checked = Number(input.value) === place;
        else if (input.type === "checkbox") input.checked = place === 1;
        else input.value = String(place);
      });
      return place;
    });
    this.show();
  }

  axisIndex(/** @type {string} */ id) { return this.axes.findIndex((axis) => axis.id === id); }

  /** The same places with one control elsewhere. @param {string} id @param {number} place */
  placesWith(id, place, places = this.places) {
    const at = this.axisIndex(id);
    return at < 0 ? places : places.with(at, place);
  }

  cellIndex(/** @type {number[]} */ places) {
    return this.strides.reduce((sum, stride, i) => sum + places[i] * stride, 0);
  }

  /** What a control is set to, as a number; 0 where it is as now. @param {string} id @param {number[]} places */
  settingValue(id, places) {
    const at = this.axisIndex(id);
    return at < 0 ? 0 : Number(this.axes[at].settings[places[at]].split("=")[1] || 0);
  }

  /** @param {ScaledStep} scaling @param {number[]} places @returns {Plan} */
  plan(scaling, places) {
    const link = places[this.axisIndex("workers")];
    const strong = Boolean(places[this.axisIndex("share")]) && link !== scaling.now;
    if (scaling.data.links[link].ranks < 2) return { link, buckets: 0, bandwidth: 1, strong };
    const bucketMb = this.settingValue("bucket-mb", places) || null;
    const buckets = scaling.data.buckets.findIndex(({ bucket_mb: mb }) => mb === bucketMb);
    return { link, buckets: Math.max(0, buckets), bandwidth: this.settingValue("bandwidth", places) || 1, strong };
  }

  /** Settings that have an effect: one worker exchanges nothing, and has nobody to share a batch with. */
  settings(places = this.places) {
    const plan = this.scaling ? this.plan(this.scaling, places) : null;
    const alone = plan && this.ranks(plan.link) < 2;
    return this.axes
      .map((axis, i) => {
        if (axis.id === "share" || (alone && (axis.id === "bandwidth" || axis.id === "bucket-mb"))) return "";
        return axis.id === "workers" && plan?.strong ? `${axis.settings[places[i]]}:strong` : axis.settings[places[i]];
      })
      .filter(Boolean);
  }

  ranks(/** @type {number} */ link) { return this.scaling?.data.links[link].ranks ?? 1; }

  get workers() { return this.scaling ? this.ranks(this.places[this.axisIndex("workers")]) : 1; }

  // ---- the numbers

  /** All numbers for these places of the controls. @param {number[]} places @returns {MaybePredicted} */
  state(places) {
    const at = this.cellIndex(places);
    const cell = Object.fromEntries(Object.entries(this.data.cells).map(([name, column]) => [name, column[at]]));
    const state = /** @type {MaybePredicted} */ ({ ...cell, comm: 0, exposed: 0, efficiency: 1 });
    const { scaling } = this;
    if (!scaling || state.step === null || !scaling.data.cells[at]) return state;
    const plan = this.plan(scaling, places);
    if (scaling.stepOf(at, plan) === null) return { ...state, step: null };
    const bare = this.cellIndex(this.placesWith("cuda-graphs", 0, places));
    const then = scaling.predict(at, bare, plan);
    Object.assign(state, { comm: then.comm / 1e6, exposed: then.exposed / 1e6 });
    if (scaling.changes(plan).length) Object.assign(state, this.scaled(scaling, /** @type {Predicted} */ (state), then, plan, places));
    const { before } = scaling.data;
    const ranks = this.ranks(plan.link);
    if (ranks !== before) {
      const same = this.state(this.placesWith("workers", scaling.now, places));
      state.efficiency = (state.factor * before) / ranks / same.factor;
    }
    return state;
  }

  /** What other workers, links and buckets make of a cell. @param {ScaledStep} scaling @param {Predicted} cell @param {ReturnType<ScaledStep["predict"]>} then @param {Plan} plan @param {number[]} places */
  scaled(scaling, cell, then, plan, places) {
    const { adjusted, narrowest, before } = scaling.data;
    const name = this.settings(places).map((setting) => setting.split("=")[0]).sort().join("+");
    const step = adjustedStep(then, adjusted[name] ?? [0, 0], narrowest);
    const moreSamples = plan.strong ? 1 : this.ranks(plan.link) / before;
    return {
      ...step,
      stalls: then.stalls / 1e6,
      host: then.host / 1e6,
      device: then.device / 1e6,
      factor: (cell.factor * cell.step * moreSamples) / step.step,
      ...this.peakWith(scaling, cell, plan, places),
    };
  }

  /** Memory of a worker, with DDP's buckets where the trace has none. @param {ScaledStep} scaling @param {Predicted} cell @param {Plan} plan @param {number[]} places @returns {Peak} */
  peakWith(scaling, cell, plan, places) {
    const { held, cells } = scaling.data;
    /** @type {Peak | null | undefined} */
    const peaks = plan.strong ? cells[this.cellIndex(places)]?.peaks[plan.link] : cell;
    const more = this.ranks(plan.link) > 1 ? held : 0;
    const grown = (/** @type {number | null | undefined} */ bytes) => (bytes === null || bytes === undefined ? null : bytes + more);
    return { peak: grown(peaks?.peak), peak_low: grown(peaks?.peak_low), peak_high: grown(peaks?.peak_high) };
  }

  /** Samples a second of the whole job, where those of a step are known. */
  get rate() {
    const { samples } = this.data;
    return samples ? (samples * (this.scaling?.data.before ?? 1) * 1000) / this.now.step : 1;
  }

  // ---- what is shown

  /** @param {string} name @returns {HTMLElement | null} */
  out(name) { return this.root.querySelector(`[data-out="${name}"]`); }

  /** @param {string} name @param {string} words */
  write(name, words) { this.out(name)?.replaceChildren(words); }

  show() {
    const state = this.state(this.places);
    const settings = this.settings();
    this.root.dataset.cell = String(this.cellIndex(this.places));
    inputIn(this.form, "[type=reset]").disabled = this.places.every((place, i) => place === this.axes[i].now);
    this.axes.forEach((axis, i) => this.label(axis, this.places[i]));
    const command = ["stepscope whatif", this.data.path, ...settings.map((setting) => `--set ${setting}`)].join(" ");
    this.write("command", command);
    partIn(this.root, "[data-copy]").dataset.copy = command;
    this.root.classList.toggle("is-unknown", state.step === null);
    if (state.step === null) {
      this.showAssumptions(settings, null);
      const refused = this.data.cells.step[this.cellIndex(this.places)] === null;
      this.showUnknown(refused);
      if (!refused) this.showCurves();
      return;
    }
    const then = /** @type {Predicted} */ (state);
    this.showAssumptions(settings, then);
    this.showNumbers(then, settings.length > 0);
    this.out("scale")?.replaceChildren(drawInterval(this.now, then, settings.length > 0));
    this.out("bars")?.replaceChildren(drawBars(this.now, then, { onHost: this.data.onHost, links: Boolean(this.scaling) }));
    this.showCurves();
  }

  /** @param {Axis} axis @param {number} place */
  label(axis, place) {
    const output = this.root.querySelector(`[data-output="${axis.id}"]`);
    const [input] = this.inputs(axis);
    if (output) {
      output.textContent = axis.labels[place];
      input.setAttribute("aria-valuetext", axis.labels[place]);
    }
    if (axis.why === undefined) return;
    const alone = this.workers < 2 && (axis.id === "bandwidth" || axis.id === "bucket-mb");
    const control = /** @type {HTMLInputElement} */ (input.type === "radio" ? input.closest("fieldset") : input);
    control.disabled = Boolean(axis.why) || !this.scaling || alone;
    const hint = partIn(this.root, `[data-hint="${axis.id}"]`);
    hint.textContent = !axis.why && this.scaling && alone ? "Takes effect from 2 workers on" : hint.dataset.words ?? "";
  }

  showUnknown(/** @type {boolean} */ refused) {
    this.root.dataset.tone = "none";
    this.write("step", "Not known");
    this.write("interval", refused ? "one of these changes does not go with the others" : "there are fewer samples than workers");
    ["verdict", "pace", "pace-now", "efficiency", "efficiency-why", "exposed", "exposed-why", "peak", "peak-now", "decides", "decides-why"].forEach((name) => this.write(name, ""));
    ["scale", "bars", "batches", "weak", "strong", "bandwidths", "buckets"].forEach((name) => this.out(name)?.replaceChildren());
  }

  /** @param {Predicted} then @param {boolean} changed */
  showNumbers(then, changed) {
    const { samples, worth, decisive, onHost } = this.data;
    const change = 1 - 1 / then.factor;
    this.root.dataset.tone = !changed || Math.abs(change) < worth ? "none" : change > 0 ? "good" : "bad";
    this.write("step", milliseconds(then.step));
    this.write("interval", `a step, between ${significant(then.low)} and ${significant(then.high)} with 95%`);
    this.write("verdict", changed ? verdict(this.now, then, worth) : "The step as it is: move a control");
    this.write("pace", samples ? significant(this.rate * then.factor) : `${factor(then.factor)}×`);
    const whose = this.scaling ? "of all workers; " : "";
    this.write("pace-now", samples && changed ? `${whose}${significant(this.rate)} now` : samples ? "" : `${whose}over now`);
    if (this.scaling) this.showExchange(then, this.scaling.data.before);
    this.showMemory(then, changed);
    const [who, why] = bottleneck(then, onHost, decisive);
    this.write("decides", who);
    this.write("decides-why", why);
  }

  /** @param {Predicted} then @param {number} before workers now */
  showExchange(then, before) {
    const { workers } = this;
    const many = (/** @type {number} */ number) => (number === 1 ? "one worker" : `${number} workers`);
    this.write("efficiency", percent(then.efficiency));
    this.write("efficiency-why", workers === before ? `of ${many(workers)} as now`
      : `of ${Number((workers / before).toFixed(2))} times the throughput of ${many(before)}`);
    this.write("exposed", workers < 2 ? "none" : milliseconds(then.exposed < 0.005 ? 0 : then.exposed));
    this.write("exposed-why", workers < 2 ? "one worker exchanges nothing" : `of ${milliseconds(then.comm)} between workers`);
  }

  /** @param {Predicted} then @param {boolean} changed */
  showMemory(then, changed) {
    const out = this.out("peak");
    if (!out) return;
    const { limit } = this.data;
    const { peak, peak_low: low, peak_high: high } = then;
    const before = this.now.peak === null ? "" : `${size(this.now.peak)} now`;
    const beyond = peak !== null && limit && peak > limit ? `more than the ${size(limit)} there are; ` : "";
    const range = low !== null && high !== null && high > low ? `${size(low)} to ${size(high)}; ` : "";
    this.write("peak", peak === null ? "not known" : size(peak));
    this.write("peak-now", peak === null ? before : changed && before ? `${beyond}${range}${before}` : beyond);
    out.classList.toggle("is-beyond", Boolean(beyond));
  }

  /** @param {string[]} settings @param {Predicted | null} then */
  showAssumptions(settings, then) {
    const lines = settings.flatMap((setting) => this.data.assumptions[setting] ?? []);
    if (this.scaling && then && this.workers > 1) lines.push(...this.exchangeAssumptions(this.scaling, then));
    const [box, list] = [this.out("assumed-box"), this.out("assumed")];
    if (box) box.hidden = !lines.length;
    list?.replaceChildren(...lines.map((line) => element("li", "", sentence(line))));
  }

  /** @param {ScaledStep} scaling @param {Predicted} then */
  exchangeAssumptions(scaling, then) {
    const plan = this.plan(scaling, this.places);
    const { links, buckets, batch } = scaling.data;
    const sizes = buckets[plan.buckets].size_bytes;
    const gradients = sizes.reduce((sum, bytes) => sum + bytes, 0);
    return [
      ...(plan.link === scaling.now ? [] : [...links[plan.link].said, batch[Number(plan.strong)]]),
      `gradients of ${size(gradients)} are summed in ${counted(sizes.length, "bucket")}: ${milliseconds(then.comm)}, of which ${milliseconds(then.exposed)} lengthen the step`,
    ];
  }

  /** The step, or the job's throughput, at every position of one control. @param {string} id */
  points(id, places = this.places) {
    const at = this.axisIndex(id);
    const axis = this.axes[at];
    const points = axis.ticks.map((label, i) => ({
      label, now: i === axis.now, chosen: i === places[at], ...this.state(this.placesWith(id, i, places)),
    }));
    return /** @type {Point[]} */ (points.filter((point) => point.step !== null));
  }

  /** Throughput by workers, each with its batch (0) or all with one (1). @param {string} name @param {number} share */
  showScaling(name, share) {
    const at = this.axisIndex("share");
    const why = (share && this.axes[at].why) || "";
    const points = why ? [] : this.points("workers", this.placesWith("share", share));
    if (share !== this.places[at]) points.forEach((point) => { point.chosen = false; });
    const words = why || (points.length < 2 ? "There are fewer samples than workers." : "");
    const unit = this.data.samples ? "samples a second" : "times now";
    this.out(name)?.replaceChildren(words || drawScaling(points, this.rate, unit, this.room));
  }

  showCurves() {
    this.out("batches")?.replaceChildren(drawCurve(this.points("batch"), this.data.batch ? "batch" : "times"));
    if (!this.scaling) return;
    this.showScaling("weak", 0);
    this.showScaling("strong", 1);
    const { links } = this.scaling.data;
    const chosen = links[this.places[this.axisIndex("workers")]];
    const link = chosen.all_reduce.length ? chosen : links.find((other) => other.all_reduce.length);
    this.write("workers-from", link ? ` Links: ${link.basis}.` : "");
    this.out("links")?.classList.toggle("is-alone", this.workers < 2);
    this.out("bandwidths")?.replaceChildren(drawCurve(this.points("bandwidth"), "times"));
    this.out("buckets")?.replaceChildren(drawCurve(this.points("bucket-mb"), "MiB"));
  }
}

registerPane("whatif", (section) => {
  const root = /** @type {HTMLElement | null} */ (section.querySelector("[data-wi]"));
  if (!root) return {};
  const whatif = new WhatIf(root, JSON.parse(partIn(section, "#whatif-data").textContent ?? ""));
  partsIn(section, "[data-wi-set]").forEach((button) =>
    button.addEventListener("click", () => {
      whatif.set([button.dataset.wiSet ?? ""]);
      root.scrollIntoView({ block: "nearest" });
    }));
  return { ready: whatif.ready, handle: { whatif } };
});
