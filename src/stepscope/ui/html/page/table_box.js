// Tables under tabs: sorted by a click on a heading, filtered by a word.

import { button, element, inputIn, partIn } from "./dom.js";
import { count, duration, factor, percent, rate, signedPercent, significant, size } from "./format.js";

const FIRST_ROWS = 25;

/** How numbers of each type are written; "text", "code" and "kind" are not numbers. @type {Record<string, (value: any) => string>} */
const NUMBERS = {
  ns: duration,
  bytes: size,
  rate: (value) => rate(value * 1e9, "B/s"),
  count,
  index: String,
  offset: duration,
  error: (ns) => `±${duration(ns)}`,
  ppm: (value) => `${significant(value)} ppm`,
  times: (value) => `${factor(value)}×`,
  number: significant,
  share: percent,
  change: signedPercent,
  flops: (value) => rate(value, "FLOP"),
  wait: ([ns, error]) => (ns > error ? `${duration(ns)} ±${duration(error)}` : `not resolved (±${duration(error)})`),
};

/** Rows that hold the word, sorted by a column; cells without a value come last. @param {TableData} table @param {string} word in small letters @param {number} column -1 keeps the order @param {boolean} down */
export function sortedRows(table, word, column, down) {
  const holds = (/** @type {any[]} */ row) => row.some((cell) => typeof cell === "string" && cell.toLowerCase().includes(word));
  const rows = word ? table.rows.filter(holds) : [...table.rows];
  if (column < 0) return rows;
  const way = down ? -1 : 1;
  const value = (/** @type {any} */ cell) => (Array.isArray(cell) ? cell[0] : cell);
  return rows.sort((a, b) => {
    const [x, y] = [value(a[column]), value(b[column])];
    if (x === null || y === null) return Number(x === null) - Number(y === null);
    return way * (typeof x === "string" ? x.localeCompare(y) : x - y);
  });
}

export class TableBox {
  /** @param {HTMLElement} root @param {(name: string) => void} onFind */
  constructor(root, onFind) {
    this.root = root;
    this.onFind = onFind;
    this.tabs = partIn(root, ".tabs");
    this.box = partIn(root, ".table-box");
    this.filter = inputIn(root, ".table-filter");
    this.count = partIn(root, ".table-count");
    this.absent = partIn(root, ".table-absent");
    this.tables = /** @type {TableData[]} */ ([]);
    this.table = /** @type {TableData | null} */ (null);
    this.all = false;
    this.sort = { column: -1, down: true };
    this.filter.addEventListener("input", () => this.show());
    this.tabs.addEventListener("keydown", (event) => this.key(event));
  }

  load(/** @type {TableData[]} */ tables) {
    const before = this.table?.id;
    this.tables = tables.filter((table) => table.rows.length);
    this.showAbsent(tables.filter((table) => table.absent));
    this.tabs.replaceChildren(...this.tables.map((table) => this.tab(table)));
    this.open(this.tables.find((table) => table.id === before) ?? this.tables[0] ?? null);
  }

  showAbsent(/** @type {TableData[]} */ missing) {
    const titles = /** @type {Map<string, string[]>} */ (new Map());
    missing.forEach(({ absent, title }) => titles.set(absent, [...(titles.get(absent) ?? []), title]));
    this.absent.replaceChildren(...[...titles].map(([reason, names]) => {
      const line = element("p");
      line.append(element("strong", "", names.join(", ")), ` ${reason}.`);
      return line;
    }));
  }

  tab(/** @type {TableData} */ table) {
    const tab = button("", () => this.open(table));
    tab.setAttribute("role", "tab");
    tab.id = `tab-${table.id}`;
    tab.setAttribute("aria-controls", this.box.id);
    tab.append(table.title, element("span", "tab-count", count(table.rows.length)));
    return tab;
  }

  key(/** @type {KeyboardEvent} */ event) {
    const by = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (!by || !this.table) return;
    const next = (this.tables.indexOf(this.table) + by + this.tables.length) % this.tables.length;
    this.open(this.tables[next]);
    /** @type {HTMLElement} */ (this.tabs.children[next]).focus();
    event.preventDefault();
    event.stopPropagation();
  }

  open(/** @type {TableData | null} */ table) {
    this.table = table;
    this.all = false;
    this.sort = { column: table ? table.sort : -1, down: true };
    [...this.tabs.children].forEach((tab, i) => {
      const chosen = this.tables[i] === table;
      tab.setAttribute("aria-selected", String(chosen));
      /** @type {HTMLElement} */ (tab).tabIndex = chosen ? 0 : -1;
    });
    this.box.setAttribute("aria-labelledby", table ? `tab-${table.id}` : "");
    partIn(this.root, ".table-tools").hidden = !table;
    this.show();
  }

  show() {
    const { table } = this;
    if (!table) {
      this.box.replaceChildren();
      return;
    }
    const rows = sortedRows(table, this.filter.value.trim().toLowerCase(), this.sort.column, this.sort.down);
    const shown = this.all ? rows : rows.slice(0, FIRST_ROWS);
    const drawn = element("table");
    drawn.append(element("caption", "unseen", table.title), this.head(table), this.body(table, shown));
    this.box.replaceChildren(drawn);
    if (rows.length > shown.length) this.box.append(this.more(rows.length));
    const all = table.rows.length;
    this.count.textContent = rows.length < all ? `${count(rows.length)} of ${count(all)}` : "";
  }

  head(/** @type {TableData} */ table) {
    const head = element("thead");
    const row = head.insertRow();
    table.columns.forEach(([label, type], column) => {
      const cell = element("th", type in NUMBERS ? "number" : "");
      cell.scope = "col";
      const sorted = this.sort.column === column;
      cell.setAttribute("aria-sort", sorted ? (this.sort.down ? "descending" : "ascending") : "none");
      cell.append(button(label, () => this.sortBy(column, type)));
      row.append(cell);
    });
    return head;
  }

  /** @param {number} column @param {string} type */
  sortBy(column, type) {
    const same = this.sort.column === column;
    this.sort = { column, down: same ? !this.sort.down : type in NUMBERS };
    this.show();
    /** @type {HTMLElement} */ (this.box.querySelectorAll("th button")[column]).focus();
  }

  /** @param {TableData} table @param {any[][]} rows */
  body(table, rows) {
    const body = element("tbody");
    const most = table.columns.map(([, type], column) =>
      (type === "ns" ? table.rows.reduce((high, row) => Math.max(high, row[column] || 0), 0) : 0));
    for (const row of rows) {
      const line = body.insertRow();
      table.columns.forEach(([, type], column) => this.fill(line.insertCell(), row[column], type, column, most[column]));
    }
    return body;
  }

  /** @param {HTMLElement} cell @param {any} value @param {string} type @param {number} column @param {number} most */
  fill(cell, value, type, column, most) {
    if (type in NUMBERS) cell.className = "number";
    if (value === null || value === "") {
      cell.textContent = "–";
      cell.classList.add("nothing");
    } else if (type === "code") {
      this.fillCode(cell, value, column);
    } else if (type === "kind") {
      cell.className = "kind";
      cell.append(element("span", `swatch bg-${value}`), value);
    } else {
      cell.textContent = NUMBERS[type] ? NUMBERS[type](value) : value;
      if (type === "ns" && column === this.sort.column && most) {
        cell.classList.add("bar");
        cell.style.setProperty("--share", `${(100 * value) / most}%`);
      }
    }
  }

  /** @param {HTMLElement} cell @param {string} value @param {number} column */
  fillCode(cell, value, column) {
    cell.className = "code";
    cell.title = value;
    if (column > 0 || !this.table?.events) {
      cell.textContent = value;
      return;
    }
    const link = button(value, () => this.onFind(value), "link");
    link.title = `${value}\n\nShow in the timeline`;
    cell.append(link);
  }

  more(/** @type {number} */ rows) {
    return button(`Show all ${count(rows)}`, () => {
      this.all = true;
      this.show();
    }, "more");
  }
}
