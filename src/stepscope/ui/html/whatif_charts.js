// The pictures of "What if": SVG made anew whenever a control moves.

const WhatIfCharts = (() => {
  const NS = "http://www.w3.org/2000/svg";

  // Making a formatter takes longer than all of a drawing.
  const formats = [0, 1, 2].map((digits) => new Intl.NumberFormat("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
  const plain = new Intl.NumberFormat("en-US");
  const count = (value) => plain.format(value);

  function figures(value) {
    const size = Math.abs(value);
    return formats[size >= 99.95 || size === 0 ? 0 : size >= 9.995 ? 1 : 2].format(value);
  }

  const ms = (value) => `${figures(value)} ms`;
  const times = (value) => value.toFixed(value >= 9.95 ? 0 : value >= 1.15 ? 1 : 2);
  const percent = (value) => `${(100 * value).toFixed(0)}%`;

  function make(name, attributes, ...children) {
    const part = document.createElementNS(NS, name);
    Object.entries(attributes).forEach(([key, value]) => part.setAttribute(key, value));
    part.append(...children);
    return part;
  }

  const text = (name, x, y, words) => make("text", { class: name, x: x.toFixed(1), y: y.toFixed(1) }, words);
  const line = (list) => list.map(([a, b]) => `${a.toFixed(1)} ${b.toFixed(1)}`).join("L");
  const drawing = (width, height, words, parts) =>
    make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words }, ...parts);

  // 1, 2 or 5 times a power of ten, up to the most.
  function ticks(most, many) {
    const rough = most / many;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((s) => s * power).find((s) => s >= rough);
    return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, i) => i * step);
  }

  // Now and then on one line, with the band around what is predicted.
  function scale(now, then, changed) {
    const [width, height, left, right] = [760, 62, 6, 754];
    const top = Math.max(now.high, then.high) * 1.04;
    const x = (value) => left + ((right - left) * value) / top;
    const parts = [make("path", { class: "axis", d: `M${left} 40H${right}` })];
    ticks(top, 8).forEach((tick) => {
      parts.push(make("path", { class: "tick", d: `M${x(tick).toFixed(1)} 40v5` }));
      if (x(tick) < right - 24) parts.push(text("level", Math.max(x(tick), left + 4), 58, tick ? count(tick) : "0 ms"));
    });
    parts.push(make("rect", { class: "band", x: x(then.low).toFixed(1), y: 14, width: Math.max(2, x(then.high) - x(then.low)).toFixed(1), height: 22, rx: 4 }));
    if (changed) parts.push(make("path", { class: "was", d: `M${x(now.step).toFixed(1)} 8V40` }));
    parts.push(make("path", { class: "is", d: `M${x(then.step).toFixed(1)} 10V40` }));
    if (changed && Math.abs(x(now.step) - x(then.step)) > 46) {
      parts.push(text(x(now.step) > right - 30 ? "word is-end" : "word", x(now.step) + (x(now.step) > right - 30 ? -6 : 5), 10, "now"));
    }
    return drawing(width, height, `A step of ${ms(then.step)}, between ${figures(then.low)} and ${figures(then.high)}; now ${ms(now.step)}`, parts);
  }

  // What host, device and links need, before and after; of the links' the part that nothing hides.
  function bars(now, then, { onHost, links }) {
    const pair = (name, kind, of, shown = () => 0) => [["now", now, `${kind} is-now`], ["then", then, kind]].map(([when, at, look]) => ({ name: `${name} ${when}`, value: of(at), shown: shown(at), kind: look }));
    const rows = [
      ...pair("Host", "host", (at) => at.host),
      ...(onHost ? (!links && now.device ? pair("Comm", "device", (at) => at.device) : []) : pair("Device", "device", (at) => at.device)),
      ...(links ? pair("Links", "links", (at) => at.comm, (at) => Math.min(at.exposed, at.comm)) : []),
    ];
    const [width, left, right, row] = [420, 84, 342, 24];
    const most = Math.max(...rows.map((each) => each.value), then.step, now.step) || 1;
    const x = (value) => left + ((right - left) * value) / most;
    const parts = rows.flatMap(({ name, value, shown, kind }, i) => {
      const y = 8 + i * row + Math.floor(i / 2) * 7;
      const bar = (from, to, look) => make("rect", { class: look, x: x(from).toFixed(1), y, width: Math.max(1.5, x(to) - x(from)).toFixed(1), height: 17, rx: 3 });
      return [
        text("who", left - 8, y + 9, name),
        bar(0, value, kind),
        ...(shown > 0 ? [bar(value - shown, value, `${kind} is-shown`)] : []),
        text("value", x(value) + 6, y + 9, ms(value)),
      ];
    });
    const end = 8 + rows.length * row + Math.ceil(rows.length / 2) * 7 - 4;
    parts.unshift(make("path", { class: "step", d: `M${x(then.step).toFixed(1)} 2V${end}` }));
    parts.push(text(x(then.step) > right - 40 ? "word is-end" : "word", x(then.step), end + 12, `step ${ms(then.step)}`));
    return drawing(width, end + 18, rows.map(({ name, value }) => `${name} ${ms(value)}`).join(", "), parts);
  }

  // A level a tick, the band, the curve, and a dot with two lines below for each point.
  function plot(points, { levels, y, of, ideal, rows, words, size }) {
    const [width, height, left, right, bottom] = size;
    const x = (i) => (points.length > 1 ? left + 24 + ((right - left - 42) * i) / (points.length - 1) : (left + right) / 2);
    const parts = levels.flatMap(([value, label]) => [
      make("path", { class: "grid", d: `M${left} ${y(value).toFixed(1)}H${right}` }),
      text("level is-side", left - 8, y(value), label),
    ]);
    const high = points.map((point, i) => [x(i), y(of(point)[2])]);
    const low = points.map((point, i) => [x(i), y(of(point)[1])]).reverse();
    parts.push(make("path", { class: "band", d: `M${line([...high, ...low])}Z` }));
    if (ideal) parts.push(make("path", { class: "ideal", d: `M${line(points.map((point, i) => [x(i), y(ideal(point))]))}` }));
    parts.push(make("path", { class: "curve", d: `M${line(points.map((point, i) => [x(i), y(of(point)[0])]))}` }));
    points.forEach((point, i) => {
      const dot = make("circle", { class: `dot${point.chosen ? " is-chosen" : ""}`, cx: x(i).toFixed(1), cy: y(of(point)[0]).toFixed(1), r: point.chosen ? 6 : 4 });
      dot.append(make("title", {}, words(point)));
      parts.push(dot);
      rows.forEach(({ of: told }, row) => parts.push(text(row ? "pace" : point.chosen ? "level is-strong" : "level", x(i), bottom + 20 + 16 * row, told(point))));
    });
    rows.forEach(({ name }, row) => parts.push(text("level is-side", left - 8, bottom + 20 + 16 * row, name)));
    return drawing(width, height, points.map(words).join("; "), parts);
  }

  // Step time against one control.
  function curve(points, name) {
    if (!points.length) return "";
    const [top, bottom] = [14, 150];
    const most = Math.max(...points.map((point) => point.high)) * 1.05;
    return plot(points, {
      size: [420, 198, 58, 412, bottom],
      levels: ticks(most, 4).map((tick) => [tick, tick ? count(tick) : "0 ms"]),
      y: (value) => bottom - ((bottom - top) * value) / most,
      of: (point) => [point.step, point.low, point.high],
      rows: [
        { name, of: (point) => (point.now && points.length < 7 && point.label !== "traced" ? `${point.label} now` : point.label) },
        { name: "pace", of: (point) => `${times(point.factor)}×` },
      ],
      words: (point) => `${name} ${point.label}: ${ms(point.step)} (${figures(point.low)} to ${figures(point.high)}), ${times(point.factor)} times the samples a second`,
    });
  }

  // Throughput against workers, both doubling from line to line; dashed: what they would do at best.
  function scaling(points, rate, unit, room) {
    const width = Math.min(720, Math.max(460, room || 620));
    const [top, bottom] = [14, 206];
    const pace = (factor) => factor * rate;
    const spread = (point) => [point.factor, (point.factor * point.step) / point.high, (point.factor * point.step) / point.low].map(pace);
    const ideal = (point) => pace((point.factor / point.efficiency));
    const values = points.flatMap((point) => [...spread(point), ideal(point)]);
    const [least, most] = [Math.min(...values) * 0.9, Math.max(...values) * 1.1];
    const y = (value) => bottom - ((bottom - top) * Math.log(value / least)) / Math.log(most / least);
    const levels = [];
    const every = Math.max(1, Math.ceil(Math.log10(most / least) / 4));
    for (let power = Math.floor(Math.log10(least)); 10 ** power <= most; power += every) {
      (most / least < 1000 ? [1, 2, 5] : [1]).forEach((digit) => {
        const value = digit * 10 ** power;
        if (value >= least && value <= most) levels.push([value, value >= 1 ? count(value) : String(Number(value.toPrecision(1)))]);
      });
    }
    return plot(points, {
      size: [width, 258, 66, width - 4, bottom],
      levels, y, of: spread, ideal,
      rows: [{ name: "workers", of: (point) => point.label }, { name: "efficiency", of: (point) => percent(point.efficiency) }],
      words: (point) => `${point.label} ${Number.parseFloat(point.label) === 1 ? "worker" : "workers"}: ${figures(pace(point.factor))} ${unit} (${figures(spread(point)[1])} to ${figures(spread(point)[2])}), a step of ${ms(point.step)}, efficiency ${percent(point.efficiency)}`,
    });
  }

  return { figures, ms, times, percent, scale, bars, curve, scaling };
})();
