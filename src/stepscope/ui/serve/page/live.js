// The live section of a run's page: what its ranks do now, while the job trains.
// The server sends words and points (live_view.py); nothing is computed or phrased here.

/**
 * As live_view.py sends it.
 * @typedef {{ value: number, words: string }} Top
 * @typedef {{ id: string, words: string, detail: string, share?: number }} Part
 * @typedef {{ rank: string, first: number, ms: number[], marks: string[] }} Line
 * @typedef {{ first: number, last: number, ms: number[], marks: string[], top: Top }} Stretches
 * @typedef {{ cells: string[], tone: string, line: number | null, spark: number[] }} Row
 * @typedef {{ id: string, summary: string, severity: string }} Finding
 * @typedef {{ label: string, value: string, detail: string }} Fact
 * @typedef {{
 *   status: string, tone: string, detail: string, has_ended: boolean, reload: boolean,
 *   facts: Fact[], phases: Part[], stalls: Part[], changes: string[], late: string[], notes: string[],
 *   lines: Line[], lines_top: Top | null, mark_words: Record<string, string>, stretches: Stretches | null,
 *   memory: number[], memory_top: Top | null, rows: Row[], more_ranks: number, ranks: string,
 *   verdict: { verdict: string, findings: Finding[] } | null, explaining: boolean,
 *   window: { state: string, words: string } | null,
 * }} View
 */

(() => {
  const section = document.getElementById("live");
  if (!section || !section.dataset.run) return;
  const base = `/runs/${encodeURIComponent(section.dataset.run)}`;
  const reloadedKey = `stepscope-reloaded-${section.dataset.run}`;
  const COLUMNS = ["rank", "steps", "steps/s now", "mean", "p99", "stalls", "memory", "last step", ""];
  const LINE_COLOURS = 8;
  const MOST_RELOADS = 5;

  // The page's skeleton: made once, filled by every update.

  /**
   * @template {keyof HTMLElementTagNameMap} Tag
   * @param {Tag} tag
   * @param {string} [name]
   * @param {Element | null} [parent]
   * @param {string} [text]
   * @returns {HTMLElementTagNameMap[Tag]}
   */
  const make = (tag, name, parent, text) => {
    const node = document.createElement(tag);
    if (name) node.className = name;
    if (text !== undefined) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  };
  /** @param {Element} node @param {string} text */
  const say = (node, text) => {
    if (node.textContent !== text) node.textContent = text;
  };
  /** @param {string} text @param {"" | "bad"} [tone] */
  const sayLink = (text, tone = "") => {
    say(link, text);
    link.dataset.tone = tone;
  };
  /** @param {Element} parent @param {string} title */
  const block = (parent, title) => {
    const box = make("div", "live-block", parent);
    make("h3", "", box, title);
    return box;
  };
  /** @param {Element} parent @param {string} name @param {string} label */
  const chart = (parent, name, label) => {
    const canvas = make("canvas", `live-chart ${name}`, parent);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", label);
    return canvas;
  };

  section.replaceChildren();
  section.classList.add("live");
  const head = make("div", "live-head", section);
  const badge = make("span", "live-badge", head, "connecting");
  badge.setAttribute("role", "status");
  const detail = make("span", "live-detail", head);
  const link = make("span", "live-link", head);
  const button = make("button", "live-button", head, "Capture a window now");
  button.type = "button";
  button.disabled = true;
  const asked = make("span", "live-asked", head);
  asked.setAttribute("role", "status");
  const verdict = make("div", "live-verdict is-waiting", section);
  const sentence = make("p", "live-sentence", verdict);
  const findings = make("ul", "live-findings", verdict);
  const facts = make("dl", "live-facts", section);
  const lately = block(section, "Last steps");
  const recent = chart(lately, "is-tall", "Time of the last steps, one line per rank");
  const legend = make("ul", "live-legend", lately);
  const pointed = make("p", "live-small", lately);
  const grid = make("div", "live-grid", section);
  const whole = block(grid, "The run so far");
  const stretches = chart(whole, "", "Mean step of equal stretches of the run");
  const span = make("p", "live-small", whole);
  const memoryBlock = block(grid, "Memory at step ends");
  const memory = chart(memoryBlock, "", "Memory when the last steps ended");
  const held = make("p", "live-small", memoryBlock);
  const phaseBlock = block(grid, "A typical step, on the CPU");
  const phases = make("div", "live-bar", phaseBlock);
  const phaseList = make("ul", "live-list", phaseBlock);
  const stallBlock = block(grid, "Stalls and changes");
  const stallList = make("ul", "live-list", stallBlock);
  const changeList = make("ul", "live-list", stallBlock);
  const rankBlock = block(section, "Ranks");
  const lateList = make("ul", "live-late", rankBlock);
  const table = make("table", "live-ranks", rankBlock);
  const headRow = make("tr", "", make("thead", "", table));
  COLUMNS.forEach((name) => make("th", "", headRow, name));
  const body = make("tbody", "", table);
  const compare = make("p", "live-small", rankBlock);
  const notes = make("ul", "live-notes", section);

  // Lists keep their nodes: a page that is rebuilt ten times a second cannot be read or clicked.

  /**
   * @template Item
   * @param {Element} list
   * @param {readonly Item[]} items
   * @param {() => Element} create
   * @param {(node: any, item: Item, place: number) => void} update
   */
  const fill = (list, items, create, update) => {
    while (list.children.length > items.length) list.lastElementChild?.remove();
    while (list.children.length < items.length) list.append(create());
    items.forEach((item, place) => update(list.children[place], item, place));
  };
  /** @param {Element} list @param {string[]} texts */
  const fillTexts = (list, texts) => fill(list, texts, () => make("li"), say);
  /** @param {Element} list @param {Part[]} parts @param {string} kind */
  const fillParts = (list, parts, kind) =>
    fill(
      list,
      parts,
      () => {
        const item = make("li");
        make("i", "", item);
        make("b", "", item);
        make("span", "", item);
        return item;
      },
      (item, part) => {
        item.children[0].className = `live-swatch ${kind}-${part.id}`;
        say(item.children[1], part.words);
        say(item.children[2], part.detail);
      },
    );

  // Charts.

  /** @param {number} steps */
  const count = (steps) => steps.toLocaleString("en");
  /** @param {string} name */
  const colour = (name) => getComputedStyle(section).getPropertyValue(name).trim() || "#888";
  /** @param {string} mark */
  const markColour = (mark) => colour(`--live-${mark}`);
  /** @param {HTMLCanvasElement} canvas */
  const prepare = (canvas) => {
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
    if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
    const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    return { pen, width, height };
  };
  /**
   * @param {CanvasRenderingContext2D} pen
   * @param {number[]} values
   * @param {number} left
   * @param {number} step
   * @param {number} height
   * @param {number} top
   */
  const drawLine = (pen, values, left, step, height, top) => {
    pen.beginPath();
    values.forEach((value, place) => {
      const y = height - Math.min(value / top, 1) * (height - 2) - 1;
      if (place) pen.lineTo(left + place * step, y);
      else pen.moveTo(left, y);
    });
    pen.stroke();
  };

  /** @type {number | null} */
  let place = null; // where the pointer is in the chart of the last steps
  /** @param {Line[]} lines @param {Top} top @param {Record<string, string>} markWords */
  const drawRecent = (lines, top, markWords) => {
    const { pen, width, height } = prepare(recent);
    const shown = lines.filter((line) => line.ms.length);
    if (!shown.length) return;
    const first = Math.min(...shown.map((line) => line.first));
    const last = Math.max(...shown.map((line) => line.first + line.ms.length - 1));
    const step = width / Math.max(1, last - first);
    shown.forEach((line) => {
      line.marks.forEach((mark, number) => {
        if (!mark) return;
        pen.fillStyle = markColour(mark);
        const tall = Math.min(line.ms[number] / top.value, 1) * height;
        const x = (line.first + number - first) * step;
        pen.fillRect(x - Math.max(1, step / 2), height - tall, Math.max(2, step), tall);
      });
    });
    pen.lineWidth = 1.4;
    shown.forEach((line, number) => {
      pen.strokeStyle = colour(`--live-line-${number % LINE_COLOURS}`);
      drawLine(pen, line.ms, (line.first - first) * step, step, height, top.value);
    });
    const ranks = shown.length > 1 ? shown.map((line, number) => [`line-${number % LINE_COLOURS}`, `rank ${line.rank}`]) : [];
    fill(legend, [...ranks, ...Object.entries(markWords)], () => make("li"), (node, [name, words]) => {
      node.style.setProperty("--live-line", `var(--live-${name})`);
      say(node, words);
    });
    describe(shown, first, last, step, top, markWords);
  };
  /** @param {Line[]} lines @param {number} first @param {number} last @param {number} step @param {Top} top @param {Record<string, string>} markWords */
  const describe = (lines, first, last, step, top, markWords) => {
    const chosen = place === null ? null : Math.min(last, first + Math.round(place / step));
    if (chosen === null) {
      say(pointed, `steps ${count(first)} to ${count(last)} · full height ${top.words}`);
      return;
    }
    const words = lines.flatMap((line) => {
      const number = chosen - line.first;
      if (number < 0 || number >= line.ms.length) return [];
      const mark = line.marks[number];
      return [`rank ${line.rank} ${line.ms[number]} ms${mark ? ` (${markWords[mark]})` : ""}`];
    });
    say(pointed, `step ${count(chosen)}: ${words.join(" · ")}`);
  };
  /** @param {HTMLCanvasElement} canvas @param {number[]} values @param {string[]} marks @param {string} name @param {Top} top */
  const drawBars = (canvas, values, marks, name, top) => {
    const { pen, width, height } = prepare(canvas);
    const step = width / Math.max(1, values.length);
    values.forEach((value, number) => {
      pen.fillStyle = marks[number] ? markColour(marks[number]) : colour(name);
      const tall = Math.min(value / top.value, 1) * height;
      pen.fillRect(number * step, height - tall, Math.max(0.6, step - 0.4), tall);
    });
  };
  /** @param {HTMLCanvasElement} canvas @param {number[]} values @param {number | null} number @param {Top} top */
  const drawSpark = (canvas, values, number, top) => {
    const { pen, width, height } = prepare(canvas);
    pen.strokeStyle = colour(number === null ? "--live-muted" : `--live-line-${number}`);
    if (values.length > 1) drawLine(pen, values, 0, width / (values.length - 1), height, top.value);
  };

  // One update.

  /** @param {View} view */
  const show = (view) => {
    say(badge, view.status);
    badge.dataset.tone = view.tone;
    say(detail, view.detail);
    showVerdict(view);
    fill(
      facts,
      view.facts,
      () => {
        const fact = make("div");
        make("dt", "", fact);
        make("dd", "", fact);
        make("small", "", fact);
        return fact;
      },
      (node, fact) => {
        say(node.children[0], fact.label);
        say(node.children[1], fact.value);
        say(node.children[2], fact.detail);
      },
    );
    lately.hidden = !view.lines_top;
    whole.hidden = !view.stretches;
    memoryBlock.hidden = !view.memory_top;
    phaseBlock.hidden = !view.phases.length;
    rankBlock.hidden = !view.rows.length;
    if (view.lines_top) drawRecent(view.lines, view.lines_top, view.mark_words);
    if (view.stretches) {
      const { ms, marks, top, first, last } = view.stretches;
      drawBars(stretches, ms, marks, "--live-line-0", top);
      say(span, `mean step, steps ${count(first)} to ${count(last)} · full height ${top.words}`);
    }
    if (view.memory_top) {
      drawBars(memory, view.memory, [], "--live-memory", view.memory_top);
      say(held, `full height ${view.memory_top.words}`);
    }
    showParts(view);
    showRanks(view);
    fillTexts(notes, view.notes);
    showWindow(view);
  };
  /** @param {View} view */
  const showVerdict = (view) => {
    const last = view.verdict;
    const waiting = view.explaining ? "stepscope is explaining the window" : "a verdict comes with the first window";
    say(sentence, last ? last.verdict : view.has_ended ? "" : waiting);
    verdict.classList.toggle("is-waiting", !last);
    verdict.hidden = !sentence.textContent;
    fill(findings, last ? last.findings : [], () => make("li"), (node, finding) => {
      node.className = `is-${finding.severity}`;
      const page = { href: section.dataset.findingPage?.replace("ID", finding.id), target: "_blank", rel: "noopener" };
      say(Object.assign(node.firstElementChild || make("a", "", node), page), finding.summary);
    });
  };
  /** @param {View} view */
  const showParts = (view) => {
    fill(phases, view.phases, () => make("i"), (node, part) => {
      node.className = `phase-${part.id}`;
      node.style.flexGrow = `${part.share}`;
      node.title = `${part.words} ${part.detail}`;
    });
    fillParts(phaseList, view.phases, "phase");
    const none = [{ id: "none", words: "none so far", detail: "" }];
    fillParts(stallList, view.stalls.length ? view.stalls : none, "stall");
    fillTexts(changeList, view.changes);
  };
  /** @param {View} view */
  const showRanks = (view) => {
    fillTexts(lateList, view.late);
    fill(
      body,
      view.rows,
      () => {
        const row = make("tr");
        COLUMNS.forEach(() => make("td", "", row));
        make("canvas", "live-spark", row.lastElementChild);
        return row;
      },
      (row, rank) => {
        row.className = rank.tone ? `is-${rank.tone}` : "";
        rank.cells.forEach((cell, number) => say(row.children[number], cell));
        if (!view.lines_top) return;
        drawSpark(row.lastElementChild.firstElementChild, rank.spark, rank.line, view.lines_top);
      },
    );
    const more = view.more_ranks ? `${view.more_ranks} more, faster` : "";
    say(compare, [view.ranks, more].filter(Boolean).join(" · "));
  };

  // The window that was requested.
  const pending = new Set(["asked", "planned", "recording", "saving"]);
  let refused = "";
  /** @param {View} view */
  const showWindow = (view) => {
    const state = view.window;
    const isPending = state !== null && pending.has(state.state);
    if (isPending) refused = "";
    button.disabled = isPending || view.has_ended || !view.rows.length;
    button.hidden = view.has_ended;
    asked.dataset.state = state ? state.state : "";
    say(asked, refused || (state ? `window: ${state.words}` : ""));
  };
  button.addEventListener("click", async () => {
    button.disabled = true;
    refused = "";
    say(asked, "window: asking");
    try {
      const answer = await fetch(`${base}/capture`, { method: "POST" });
      const type = answer.headers.get("content-type") || "";
      const content = type.startsWith("application/json") ? await answer.json() : {};
      if (!answer.ok || content.error) refused = content.error || `refused (${answer.status})`;
    } catch {
      refused = "the server does not answer";
    }
    say(asked, refused || "window: requested");
    if (refused) button.disabled = false;
  });

  // The connection. A hidden page lets go of it: browsers open six to a server at most.

  /** @type {EventSource | null} */
  let source = null;
  /** @type {View | null} */
  let view = null;
  let isDrawn = true;
  let isOver = false;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let again;
  const draw = () => {
    isDrawn = true;
    if (view) show(view);
  };
  const drawSoon = () => {
    if (isDrawn) requestAnimationFrame(draw);
    isDrawn = false;
  };
  const close = () => {
    clearTimeout(again);
    if (source) source.close();
    source = null;
  };
  /** @param {View} last */
  const end = (last) => {
    isOver = true;
    close();
    sayLink("");
    section.dataset.over = last.status;
    if (!last.reload) return;
    // The list of runs may learn later than this page that the job has ended.
    const times = Number(sessionStorage.getItem(reloadedKey)) + 1;
    if (times > MOST_RELOADS) return;
    sessionStorage.setItem(reloadedKey, `${times}`);
    sayLink("the job has ended: its report opens");
    setTimeout(() => location.reload(), 1500 * times);
  };
  const openAgain = async () => {
    try {
      const answer = await fetch(location.pathname, { method: "HEAD" });
      if (answer.status === 401) {
        close();
        sayLink("stepscope serve was restarted and has a new token: open the address that it printed", "bad");
        return;
      }
    } catch {
      // The server is not back yet.
    }
    again = setTimeout(open, 3000);
  };
  const open = () => {
    close();
    if (isOver || document.hidden) return;
    source = new EventSource(`${base}/events`);
    source.onopen = () => sayLink("");
    source.onmessage = (message) => {
      const update = /** @type {View} */ (JSON.parse(message.data));
      view = update;
      drawSoon();
      if (update.has_ended && (update.reload || update.status === "gone")) end(update);
      else if (update.has_ended) sayLink("the report is being written");
    };
    source.onerror = () => {
      sayLink("connection lost: trying again", "bad");
      // A browser gives up when the answer is a refusal, and does not say which.
      if (source && source.readyState === EventSource.CLOSED) openAgain();
    };
  };
  document.addEventListener("visibilitychange", open);
  window.addEventListener("resize", drawSoon);
  recent.addEventListener("pointermove", (event) => {
    place = event.offsetX;
    drawSoon();
  });
  recent.addEventListener("pointerleave", () => {
    place = null;
    drawSoon();
  });
  open();
})();
