// What if: every position of the controls is a cell that was predicted beforehand.

const WhatIf = (() => {
  const NS = "http://www.w3.org/2000/svg";
  const ALONE = 0.92; // whoever needs this much of the step alone decides it
  const WORTH = 0.02;

  function figures(value) {
    const size = Math.abs(value);
    return value.toLocaleString("en-US", {
      minimumFractionDigits: size >= 99.95 || size === 0 ? 0 : size >= 9.995 ? 1 : 2,
      maximumFractionDigits: size >= 99.95 || size === 0 ? 0 : size >= 9.995 ? 1 : 2,
    });
  }

  const ms = (value) => `${figures(value)} ms`;
  const times = (value) => value.toFixed(value >= 9.95 ? 0 : value >= 1.15 ? 1 : 2);

  function make(name, attributes, ...children) {
    const part = document.createElementNS(NS, name);
    Object.entries(attributes).forEach(([key, value]) => part.setAttribute(key, value));
    part.append(...children);
    return part;
  }

  const text = (name, x, y, words) => make("text", { class: name, x: x.toFixed(1), y: y.toFixed(1) }, words);

  // 1, 2 or 5 times a power of ten, up to the most.
  function ticks(most, many) {
    const rough = most / many;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((s) => s * power).find((s) => s >= rough);
    return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, i) => i * step);
  }

  class Page {
    constructor(root, data) {
      this.root = root;
      this.data = data;
      this.form = root.querySelector("form");
      this.places = data.axes.map((axis) => axis.now);
      this.strides = data.axes.map((_, i) => data.axes.slice(i + 1).reduce((n, a) => n * a.labels.length, 1));
      this.form.addEventListener("input", () => this.read());
      this.form.addEventListener("reset", (event) => {
        event.preventDefault();
        this.set([]);
      });
      this.show();
    }

    out(name) {
      return this.root.querySelector(`[data-out="${name}"]`);
    }

    say(name, words) {
      const place = this.out(name);
      if (place) place.textContent = words;
    }

    read() {
      this.data.axes.forEach((axis, i) => {
        const parts = [...this.form.querySelectorAll(`[data-axis="${axis.id}"]`)];
        const [part] = parts;
        if (part.type === "radio") this.places[i] = Number(parts.find((each) => each.checked).value);
        else this.places[i] = part.type === "checkbox" ? Number(part.checked) : Number(part.value);
      });
      this.show();
    }

    // The controls as these settings want them, all others as now.
    set(settings) {
      this.data.axes.forEach((axis, i) => {
        const found = axis.settings.findIndex((each) => each && settings.includes(each));
        const place = found >= 0 ? found : axis.now;
        this.form.querySelectorAll(`[data-axis="${axis.id}"]`).forEach((part) => {
          if (part.type === "radio") part.checked = Number(part.value) === place;
          else if (part.type === "checkbox") part.checked = place === 1;
          else part.value = place;
        });
        this.places[i] = place;
      });
      this.show();
    }

    index(places) {
      return places.reduce((sum, place, i) => sum + place * this.strides[i], 0);
    }

    cell(places) {
      const at = this.index(places);
      return Object.fromEntries(Object.entries(this.data.cells).map(([name, column]) => [name, column[at]]));
    }

    get now() {
      return this.cell(this.data.axes.map((axis) => axis.now));
    }

    settings() {
      return this.data.axes.map((axis, i) => axis.settings[this.places[i]]).filter(Boolean);
    }

    show() {
      const then = this.cell(this.places);
      const settings = this.settings();
      this.root.dataset.cell = this.index(this.places);
      this.form.querySelector("[type=reset]").disabled = !settings.length;
      this.data.axes.forEach((axis, i) => this.label(axis, this.places[i]));
      const command = ["stepscope whatif", this.data.path, ...settings.map((each) => `--set ${each}`)].join(" ");
      this.say("command", command);
      this.root.querySelector("[data-copy]").dataset.copy = command;
      this.assume(settings);
      this.root.classList.toggle("is-unknown", then.step === null);
      if (then.step === null) {
        this.unknown();
        return;
      }
      this.numbers(this.now, then, settings);
      this.out("scale").replaceChildren(scale(this.now, then, this.widest(), settings.length > 0));
      this.out("bars").replaceChildren(bars(this.now, then, this.data.onHost));
      this.drawBatches();
    }

    label(axis, place) {
      const output = this.root.querySelector(`[data-output="${axis.id}"]`);
      if (!output) return;
      output.textContent = axis.labels[place];
      this.form.querySelector(`[data-axis="${axis.id}"]`).setAttribute("aria-valuetext", axis.labels[place]);
    }

    unknown() {
      this.say("step", "Not known");
      ["interval", "pace", "pace-now", "peak", "peak-now", "decides", "decides-why"].forEach((name) => this.say(name, ""));
      this.say("verdict", "These changes cannot be predicted together.");
      ["scale", "bars", "batches"].forEach((name) => this.out(name)?.replaceChildren());
    }

    numbers(now, then, settings) {
      const changed = settings.length > 0;
      this.say("step", ms(then.step));
      this.say("interval", `a step, between ${figures(then.low)} and ${figures(then.high)} (95%)`);
      this.say("verdict", changed ? verdict(now, then) : "The step as it is. Move a control to see what it would do.");
      const tone = !changed || Math.abs(1 - 1 / then.factor) < WORTH ? "none" : then.factor > 1 ? "good" : "bad";
      this.root.dataset.tone = tone;
      this.pace(now, then, changed);
      this.peak(now, then, changed);
      const [who, why] = decides(then, this.data.onHost);
      this.say("decides", who);
      this.say("decides-why", why);
    }

    pace(now, then, changed) {
      const { batch, step } = this.data;
      const base = batch ? (batch * 1000) / step : null;
      this.say("pace", base ? figures(base * then.factor) : `${times(then.factor)}×`);
      this.say("pace-now", changed ? (base ? `${figures(base)} now, ${times(then.factor)} times as many` : "of now, for each sample") : "");
    }

    peak(now, then, changed) {
      if (!this.out("peak")) return;
      const { limit } = this.data;
      const known = then.peak !== null;
      this.say("peak", known ? Format.bytes(then.peak) : "not known");
      const range = known && then.peak_high > then.peak_low ? `${Format.bytes(then.peak_low)} to ${Format.bytes(then.peak_high)}; ` : "";
      const beyond = known && limit && then.peak > limit ? `more than the ${Format.bytes(limit)} there are; ` : "";
      this.say("peak-now", changed && now.peak !== null ? `${beyond}${range}${Format.bytes(now.peak)} now` : beyond);
      this.out("peak").classList.toggle("is-beyond", Boolean(beyond));
    }

    assume(settings) {
      const lines = settings.flatMap((each) => this.data.assumptions[each] || []);
      this.out("assumed-box").hidden = !lines.length;
      this.out("assumed").replaceChildren(...lines.map((line) => {
        const item = document.createElement("li");
        item.textContent = line[0].toUpperCase() + line.slice(1);
        return item;
      }));
    }

    // One scale for all positions of the batch: bars do not jump when other controls move.
    widest() {
      return Math.max(this.now.high, this.cell(this.places).high);
    }

    drawBatches() {
      const place = this.data.axes.findIndex((axis) => axis.id === "batch");
      if (place < 0) return;
      const axis = this.data.axes[place];
      const points = axis.labels.map((label, i) => {
        const places = this.places.slice();
        places[place] = i;
        return { label: label.replace(" (now)", ""), now: i === axis.now, chosen: i === this.places[place], ...this.cell(places) };
      });
      this.out("batches").replaceChildren(batches(points.filter((point) => point.step !== null), this.data.batch));
    }
  }

  function verdict(now, then) {
    const before = `now ${ms(now.step)}`;
    const change = 1 - 1 / then.factor;
    if (Math.abs(change) < WORTH) return `No difference worth having: ${before}`;
    const samples = (then.factor * then.step) / now.step;
    if (Math.abs(samples - 1) > 0.01) {
      const many = samples > 1 ? `${Number(samples.toFixed(2))} times` : `${Number(samples.toFixed(2))} of`;
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
    if (onHost) return ["the host", `there is no device in this trace; it has ${host} ms of work`];
    if (Math.max(cell.host, cell.device) < ALONE * cell.step) {
      return ["neither alone", `they wait for each other: the host has ${host} ms of work, the device ${device}`];
    }
    return cell.device >= cell.host
      ? ["the device", `it has ${device} ms of work, the host ${host}`]
      : ["the host", `it has ${host} ms of work, the device ${device}`];
  }

  // Now and then on one line, with the band around what is predicted.
  function scale(now, then, most, changed) {
    const [width, height, left, right] = [760, 62, 6, 754];
    const top = most * 1.04;
    const x = (value) => left + ((right - left) * value) / top;
    const parts = [make("path", { class: "axis", d: `M${left} 40H${right}` })];
    ticks(top, 8).forEach((tick) => {
      parts.push(make("path", { class: "tick", d: `M${x(tick).toFixed(1)} 40v5` }));
      if (x(tick) < right - 24) parts.push(text("level", Math.max(x(tick), left + 4), 58, tick ? `${tick.toLocaleString("en-US")}` : "0 ms"));
    });
    parts.push(make("rect", { class: "band", x: x(then.low).toFixed(1), y: 14, width: Math.max(2, x(then.high) - x(then.low)).toFixed(1), height: 22, rx: 4 }));
    if (changed) parts.push(make("path", { class: "was", d: `M${x(now.step).toFixed(1)} 8V40` }));
    parts.push(make("path", { class: "is", d: `M${x(then.step).toFixed(1)} 10V40` }));
    if (changed && Math.abs(x(now.step) - x(then.step)) > 46) {
      parts.push(text(x(now.step) > right - 30 ? "word is-end" : "word", x(now.step) + (x(now.step) > right - 30 ? -6 : 5), 10, "now"));
    }
    return make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `A step of ${ms(then.step)}, between ${figures(then.low)} and ${figures(then.high)}; now ${ms(now.step)}` }, ...parts);
  }

  // What host and device need, before and after.
  function bars(now, then, onHost) {
    const device = onHost ? "Comm" : "Device";
    const rows = [["Host now", now.host, "host is-now"], ["Host then", then.host, "host"], [`${device} now`, now.device, "device is-now"], [`${device} then`, then.device, "device"]]
      .filter((row) => !onHost || now.device || row[2].startsWith("host"));
    const [width, left, right, row] = [420, 84, 352, 26];
    const most = Math.max(...rows.map((each) => each[1]), then.step, now.step) || 1;
    const x = (value) => left + ((right - left) * value) / most;
    const parts = rows.flatMap(([name, value, kind], i) => {
      const y = 10 + i * row + (i > 1 ? 8 : 0);
      return [
        text("who", left - 8, y + 9, name),
        make("rect", { class: kind, x: left, y, width: Math.max(1.5, x(value) - left).toFixed(1), height: 18, rx: 3 }),
        text("value", x(value) + 6, y + 9, ms(value)),
      ];
    });
    const end = 10 + rows.length * row + 8;
    parts.unshift(make("path", { class: "step", d: `M${x(then.step).toFixed(1)} 4V${end}` }));
    parts.push(text(x(then.step) > right - 40 ? "word is-end" : "word", x(then.step), end + 12, `step ${ms(then.step)}`));
    return make("svg", { viewBox: `0 0 ${width} ${end + 18}`, role: "img", "aria-label": rows.map(([name, value]) => `${name} ${ms(value)}`).join(", ") }, ...parts);
  }

  function batches(points, batch) {
    const [width, height, left, right, top, bottom] = [420, 200, 58, 408, 16, 154];
    const most = Math.max(...points.map((point) => point.high)) * 1.05;
    const x = (i) => (points.length > 1 ? left + 26 + ((right - left - 44) * i) / (points.length - 1) : (left + right) / 2);
    const y = (value) => bottom - ((bottom - top) * value) / most;
    const line = (list) => list.map(([a, b]) => `${a.toFixed(1)} ${b.toFixed(1)}`).join("L");
    const parts = ticks(most, 4).flatMap((tick) => [
      make("path", { class: "grid", d: `M${left} ${y(tick).toFixed(1)}H${right}` }),
      text("level is-side", left - 8, y(tick), tick ? tick.toLocaleString("en-US") : "0 ms"),
    ]);
    const high = points.map((point, i) => [x(i), y(point.high)]);
    const low = points.map((point, i) => [x(i), y(point.low)]).reverse();
    parts.push(make("path", { class: "band", d: `M${line([...high, ...low])}Z` }));
    parts.push(make("path", { class: "curve", d: `M${line(points.map((point, i) => [x(i), y(point.step)]))}` }));
    points.forEach((point, i) => {
      const dot = make("circle", { class: `dot${point.chosen ? " is-chosen" : ""}`, cx: x(i).toFixed(1), cy: y(point.step).toFixed(1), r: point.chosen ? 6 : 4 });
      dot.append(make("title", {}, `batch ${point.label}: ${ms(point.step)} (${figures(point.low)} to ${figures(point.high)}), ${times(point.factor)} times the samples a second`));
      parts.push(dot);
      parts.push(text(point.chosen ? "level is-strong" : "level", x(i), bottom + 22, point.now ? `${point.label} now` : point.label));
      parts.push(text("pace", x(i), bottom + 38, `${times(point.factor)}×`));
    });
    parts.push(text("level is-side", left - 8, bottom + 22, batch ? "batch" : "times"));
    parts.push(text("level is-side", left - 8, bottom + 38, "pace"));
    return make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": points.map((point) => `batch ${point.label}: ${ms(point.step)}`).join(", ") }, ...parts);
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
