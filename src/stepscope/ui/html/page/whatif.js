// The pane "What if": every position of the controls that shows a number was predicted beforehand, by
// what `stepscope whatif` itself uses. Where none was, the command is all there is.

import { codeParts, element, inputIn, partIn, partsIn } from "./dom.js";
import { factor, milliseconds, percent, sentence, significant, size } from "./format.js";
import { registerPane } from "./registry.js";
import { drawBars, drawCurve, drawInterval, drawScaling } from "./whatif_charts.js";
import { bottleneck, verdict } from "./whatif_words.js";

const NOT_HERE = "not in this page: the command below predicts it";

/** `workers=8:strong` asks for eight workers and for one batch among them. @param {string} wanted @param {string} setting */
const asksFor = (wanted, setting) => (setting === "strong" ? wanted.endsWith(":strong") : wanted.replace(/:strong$/, "") === setting);

export class WhatIf {
  /** @param {HTMLElement} root @param {WhatIfData} data */
  constructor(root, data) {
    this.root = root;
    this.data = data;
    this.form = partIn(root, "form");
    this.axes = [...data.axes, ...data.scalingAxes];
    /** Position of each control. */
    this.places = this.axes.map((axis) => axis.now);
    this.rows = new Map(data.at.map((key, row) => [key, row]));
    /** Whether any control of workers and links can be moved. */
    this.links = data.scalingAxes.some((axis) => !axis.why);
    this.form.addEventListener("input", () => this.read());
    this.form.addEventListener("reset", (event) => {
      event.preventDefault();
      this.set([]);
    });
    this.room = 0;
    this.now = /** @type {Predicted} */ (this.state(this.axes.map((axis) => axis.now)));
    this.fitWindow();
    addEventListener("resize", () => this.fitWindow());
  }

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

  /** How many workers these places ask for. @param {number[]} places */
  workersAt(places) {
    const at = this.axisIndex("workers");
    return Number(this.axes[at]?.settings[places[at]].split("=")[1] || this.data.workers);
  }

  /** One worker exchanges nothing, and workers as now share nothing anew: what is set for that has no effect. @param {number[]} places */
  effective(places) {
    const alone = this.workersAt(places) < 2;
    const asNow = this.workersAt(places) === this.data.workers;
    return this.axes.map((axis, i) => {
      const idle = alone && (axis.id === "bandwidth" || axis.id === "bucket-mb");
      return idle || (asNow && axis.id === "share") ? axis.now : places[i];
    });
  }

  /** The row of these places, if it was predicted. @param {number[]} places */
  rowOf(places) {
    const key = this.effective(places).reduce((all, place, i) => all * this.axes[i].labels.length + place, 0);
    return this.rows.get(key);
  }

  /** What the command is asked to change. */
  settings(places = this.places) {
    const effective = this.effective(places);
    const share = effective[this.axisIndex("share")];
    return this.axes
      .map((axis, i) => ({ id: axis.id, setting: axis.settings[effective[i]] }))
      .filter(({ id, setting }) => setting && id !== "share")
      .map(({ id, setting }) => (id === "workers" && share ? `${setting}:strong` : setting));
  }

  get workers() { return this.workersAt(this.places); }

  // ---- the numbers

  /** All numbers for these places of the controls; null where they were not predicted. @param {number[]} places @returns {MaybePredicted | null} */
  state(places) {
    const row = this.rowOf(places);
    if (row === undefined) return null;
    const cell = Object.fromEntries(Object.entries(this.data.cells).map(([name, column]) => [name, column[row]]));
    return /** @type {MaybePredicted} */ ({ ...cell, efficiency: this.efficiency(places, cell.factor) });
  }

  /** Throughput over that of as many times one worker; null where one worker's is not known. @param {number[]} places @param {number} factor */
  efficiency(places, factor) {
    const at = this.axisIndex("workers");
    const one = this.axes[at]?.labels.findIndex((label) => label.split(" ")[0] === "1") ?? -1;
    const row = one < 0 ? undefined : this.rowOf(places.with(at, one));
    const alone = row === undefined ? null : this.data.cells.factor[row];
    return alone && factor ? factor / alone / this.workersAt(places) : null;
  }

  /** Samples a second of the whole job, where those of a step are known. */
  get rate() {
    const { samples, workers } = this.data;
    return samples ? (samples * workers * 1000) / this.now.step : 1;
  }

  // ---- what is shown

  /** @param {string} name @returns {HTMLElement | null} */
  out(name) { return this.root.querySelector(`[data-out="${name}"]`); }

  /** @param {string} name @param {string} words */
  write(name, words) { this.out(name)?.replaceChildren(words); }

  show() {
    const state = this.state(this.places);
    const settings = this.settings();
    inputIn(this.form, "[type=reset]").disabled = this.places.every((place, i) => place === this.axes[i].now);
    this.axes.forEach((axis, i) => this.label(axis, this.places[i]));
    const command = ["stepscope whatif", this.data.path, ...settings.map((setting) => `--set ${setting}`)].join(" ");
    this.write("command", command);
    partIn(this.root, "[data-copy]").dataset.copy = command;
    this.root.classList.toggle("is-unknown", !state?.step);
    this.showAssumptions(state);
    if (state?.step) {
      const then = /** @type {Predicted} */ (state);
      this.showNumbers(then, settings.length > 0);
      this.out("scale")?.replaceChildren(drawInterval(this.now, then, settings.length > 0));
      this.out("bars")?.replaceChildren(drawBars(this.now, then, { onHost: this.data.onHost, links: this.links }));
    } else {
      this.showUnknown(state ? this.data.lines[state.assumed[0]] : NOT_HERE);
    }
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
    if (axis.id !== "bandwidth" && axis.id !== "bucket-mb") return;
    const alone = this.workers < 2;
    input.disabled = Boolean(axis.why) || alone;
    const hint = partIn(this.root, `[data-hint="${axis.id}"]`);
    hint.textContent = !axis.why && alone ? "Takes effect from 2 workers on" : hint.dataset.words ?? "";
  }

  showUnknown(/** @type {string} */ why) {
    this.root.dataset.tone = "none";
    this.write("step", why === NOT_HERE ? "—" : "Not known");
    this.out("interval")?.replaceChildren(...codeParts(why));
    ["verdict", "pace", "pace-now", "efficiency", "efficiency-why", "exposed", "exposed-why", "peak", "peak-now", "decides", "decides-why"].forEach((name) => this.write(name, ""));
    ["scale", "bars"].forEach((name) => this.out(name)?.replaceChildren());
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
    const whose = this.links ? "of all workers; " : "";
    this.write("pace-now", samples && changed ? `${whose}${significant(this.rate)} now` : samples ? "" : `${whose}over now`);
    if (this.links) this.showExchange(then);
    this.showMemory(then, changed);
    const [who, why] = bottleneck(then, onHost, decisive);
    this.write("decides", who);
    this.write("decides-why", why);
  }

  /** @param {Predicted} then */
  showExchange(then) {
    const { workers } = this;
    const { efficiency } = then;
    this.write("efficiency", efficiency === null ? "not known" : percent(efficiency));
    this.write("efficiency-why", workers < 2 ? "one worker" : `of ${workers} times the throughput of one worker`);
    this.write("exposed", workers < 2 ? "nothing" : milliseconds(then.exposed < 0.005 ? 0 : then.exposed));
    this.write("exposed-why", workers < 2 ? "one worker exchanges nothing" : `to the step, and takes ${milliseconds(then.comm)} itself`);
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

  /** @param {MaybePredicted | null} state */
  showAssumptions(state) {
    const lines = state?.step ? state.assumed.map((line) => this.data.lines[line]) : [];
    const [box, list] = [this.out("assumed-box"), this.out("assumed")];
    if (box) box.hidden = !lines.length;
    list?.replaceChildren(...lines.map((line) => {
      const item = element("li");
      item.append(...codeParts(sentence(line)));
      return item;
    }));
  }

  /** The step, or the job's throughput, at every position of one control that can be had; none unless all were predicted. @param {string} id @returns {Point[]} */
  points(id, places = this.places) {
    const at = this.axisIndex(id);
    if (at < 0) return [];
    const axis = this.axes[at];
    const states = axis.ticks.map((_, i) => this.state(this.placesWith(id, i, places)));
    if (states.includes(null)) return [];
    const points = states.map((state, i) => ({ label: axis.ticks[i], now: i === axis.now, chosen: i === places[at], ...state }));
    return /** @type {Point[]} */ (points.filter((point) => point.step));
  }

  /** A curve, or why there is none. @param {string} name @param {Point[]} points @param {() => Node | string} draw */
  showCurve(name, points, draw) {
    const why = "Not predicted together with the other changes.";
    this.out(name)?.replaceChildren(points.length > 1 ? draw() : why);
  }

  /** Throughput by workers, each with its batch (0) or all with one (1). @param {string} name @param {number} share */
  showScaling(name, share) {
    const at = this.axisIndex("share");
    const why = (share && this.axes[at].why) || "";
    if (why) return this.out(name)?.replaceChildren(...codeParts(sentence(why)));
    const points = this.points("workers", this.placesWith("share", share));
    if (share !== this.places[at]) points.forEach((point) => { point.chosen = false; });
    const unit = this.data.samples ? "samples a second" : "times now";
    this.showCurve(name, points, () => drawScaling(points, this.rate, unit, this.room));
  }

  showCurves() {
    const batches = this.points("batch");
    this.showCurve("batches", batches, () => drawCurve(batches, this.data.batch ? "batch" : "times"));
    if (!this.links) return;
    this.showScaling("weak", 0);
    this.showScaling("strong", 1);
    this.out("links")?.classList.toggle("is-alone", this.workers < 2);
    const [links, buckets] = [this.points("bandwidth"), this.points("bucket-mb")];
    this.showCurve("bandwidths", links, () => drawCurve(links, "times"));
    this.showCurve("buckets", buckets, () => drawCurve(buckets, "MiB"));
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
  return { handle: { whatif } };
});
