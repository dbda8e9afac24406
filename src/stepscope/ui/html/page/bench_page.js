// The page of a bench: drawn before it is opened; here its workloads are sorted, filtered and
// pointed at, in all charts at once.

import { matchingKeys, orderRows } from "./bench_order.js";
import { startCopying } from "./copy.js";
import { inputIn, partIn, partsIn } from "./dom.js";
import { count } from "./format.js";
import { TableBox } from "./table_box.js";
import { startTheme } from "./theme.js";
import { startTips } from "./tips.js";

/** @returns {BenchValues[]} */
function readRows() {
  return partsIn(document, ".b-table tbody tr").map((row) => ({
    key: row.dataset.key ?? "",
    words: row.dataset.words ?? "",
    values: JSON.parse(row.dataset.values ?? "[]"),
  }));
}

/** Every list and table of workloads takes the order of the keys. @param {string[]} keys */
function arrange(keys) {
  const place = new Map(keys.map((key, at) => [key, at]));
  for (const list of partsIn(document, "[data-order]")) {
    const lines = /** @type {HTMLElement[]} */ ([...list.children]);
    lines.sort((a, b) => (place.get(a.dataset.key ?? "") ?? 0) - (place.get(b.dataset.key ?? "") ?? 0));
    list.append(...lines);
  }
}

function startOrder(/** @type {BenchValues[]} */ rows) {
  const picker = /** @type {HTMLSelectElement} */ (document.querySelector("#order"));
  const headings = partsIn(document, ".b-table thead [data-column]");
  let sort = { column: -1, down: true };
  const use = (/** @type {number} */ column, /** @type {boolean} */ down) => {
    sort = { column, down };
    arrange(orderRows(rows, column, down).map((place) => rows[place].key));
    picker.value = String(column);
    headings.forEach((heading, place) => {
      const way = place !== column ? "none" : down ? "descending" : "ascending";
      heading.closest("th")?.setAttribute("aria-sort", way);
    });
  };
  headings.forEach((heading, column) => heading.addEventListener("click", () => {
    use(column, sort.column === column ? !sort.down : true);
  }));
  picker.addEventListener("change", () => use(Number(picker.value), true));
}

function startFilter(/** @type {BenchValues[]} */ rows) {
  const filter = inputIn(document, "#filter");
  const shown = partIn(document, ".b-count");
  filter.addEventListener("input", () => {
    const keys = matchingKeys(rows, filter.value);
    partsIn(document, "[data-key]").forEach((part) => part.toggleAttribute("hidden", !keys.has(part.dataset.key ?? "")));
    shown.textContent = keys.size < rows.length ? `${count(keys.size)} of ${count(rows.length)}` : "";
  });
}

/** What is pointed at in one chart stands out in all. */
function startPointing() {
  let hot = "";
  document.addEventListener("pointerover", (event) => {
    const part = event.target instanceof Element ? event.target.closest("[data-key]") : null;
    const key = part instanceof HTMLElement || part instanceof SVGElement ? part.dataset.key ?? "" : "";
    if (key === hot) return;
    hot = key;
    partsIn(document, "[data-key]").forEach((each) => each.classList.toggle("is-hot", each.dataset.key === hot));
  });
}

function startViews() {
  for (const choice of partsIn(document, ".b-chart .choice")) {
    const buttons = partsIn(choice, "button");
    buttons.forEach((button) => button.addEventListener("click", () => {
      buttons.forEach((each) => each.setAttribute("aria-pressed", String(each === button)));
      choice.closest(".b-chart")?.classList.toggle("is-amounts", button.dataset.view === "amounts");
    }));
  }
}

const rows = readRows();
startTheme(partIn(document, "#theme"), () => {}, () => {});
startCopying();
startTips(document.body, partIn(document, "main > .tip"));
startViews();
if (rows.length) {
  startOrder(rows);
  startFilter(rows);
  startPointing();
  const { tables } = /** @type {{ tables: TableData[] }} */ (JSON.parse(partIn(document, "#bench").textContent ?? ""));
  new TableBox(partIn(document, "#tables .panel"), () => {}).load(tables);
}
Object.assign(window, { stepscope: { ready: Promise.resolve(true) } });
