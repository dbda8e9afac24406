// Real tables under tabs: sorted by a click on a heading, filtered by a word.

const FIRST_ROWS = 25;

// How numbers of each type are written; "text", "code" and "kind" are not numbers.
const TYPES = {
  ns: Format.ns,
  bytes: Format.bytes,
  rate: Format.rate,
  count: Format.count,
  index: String,
  offset: Format.ns,
  error: (ns) => `±${Format.ns(ns)}`,
  ppm: (value) => `${value.toFixed(2)} ppm`,
  times: (value) => `${value.toFixed(2)}×`,
  wait: ([ns, error]) => (ns > error ? `${Format.ns(ns)} ±${Format.ns(error)}` : `not resolved (±${Format.ns(error)})`),
};

class Tables {
  constructor(root, onFind) {
    this.root = root;
    this.onFind = onFind;
    this.tabs = root.querySelector(".tabs");
    this.box = root.querySelector(".table-box");
    this.filter = root.querySelector(".table-filter");
    this.count = root.querySelector(".table-count");
    this.absent = root.querySelector(".table-absent");
    this.filter.addEventListener("input", () => this.show());
    this.tabs.addEventListener("keydown", (e) => this.key(e));
  }

  load(tables) {
    const before = this.table?.id;
    this.tables = tables.filter((table) => table.rows.length);
    this.showAbsent(tables.filter((table) => table.absent));
    this.tabs.replaceChildren(...this.tables.map((table) => this.tab(table)));
    this.open(this.tables.find((table) => table.id === before) || this.tables[0]);
  }

  showAbsent(missing) {
    const reasons = new Map();
    missing.forEach((t) => reasons.set(t.absent, [...(reasons.get(t.absent) || []), t.title]));
    this.absent.replaceChildren(...[...reasons].map(([reason, titles]) => {
      const line = document.createElement("p");
      const name = document.createElement("strong");
      name.textContent = titles.join(", ");
      line.append(name, ` ${reason}.`);
      return line;
    }));
  }

  tab(table) {
    const button = document.createElement("button");
    button.type = "button";
    button.setAttribute("role", "tab");
    button.id = `tab-${table.id}`;
    button.setAttribute("aria-controls", this.box.id);
    const count = document.createElement("span");
    count.className = "tab-count";
    count.textContent = Format.count(table.rows.length);
    button.append(table.title, count);
    button.addEventListener("click", () => this.open(table));
    return button;
  }

  key(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    const next = (this.tables.indexOf(this.table) + by + this.tables.length) % this.tables.length;
    this.open(this.tables[next]);
    this.tabs.children[next].focus();
    event.preventDefault();
    event.stopPropagation();
  }

  open(table) {
    this.table = table;
    this.all = false;
    this.sort = table ? { column: table.sort, down: true } : null;
    [...this.tabs.children].forEach((tab, i) => {
      const chosen = this.tables[i] === table;
      tab.setAttribute("aria-selected", String(chosen));
      tab.tabIndex = chosen ? 0 : -1;
    });
    this.box.setAttribute("aria-labelledby", table ? `tab-${table.id}` : "");
    this.root.querySelector(".table-tools").hidden = !table;
    this.show();
  }

  rows() {
    const wanted = this.filter.value.trim().toLowerCase();
    const hit = (row) => row.some((cell) => typeof cell === "string" && cell.toLowerCase().includes(wanted));
    const rows = wanted ? this.table.rows.filter(hit) : [...this.table.rows];
    const { column, down } = this.sort;
    if (column < 0) return rows;
    const way = down ? -1 : 1;
    const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b) : a - b);
    const value = (cell) => (Array.isArray(cell) ? cell[0] : cell);
    return rows.sort((a, b) => {
      const [x, y] = [value(a[column]), value(b[column])];
      if (x === null || y === null) return (x === null) - (y === null);
      return way * compare(x, y);
    });
  }

  show() {
    if (!this.table) {
      this.box.replaceChildren();
      return;
    }
    const rows = this.rows();
    const shown = this.all ? rows : rows.slice(0, FIRST_ROWS);
    const table = document.createElement("table");
    table.append(this.caption(), this.head(), this.body(shown));
    this.box.replaceChildren(table);
    if (rows.length > shown.length) this.box.append(this.more(rows.length));
    const all = this.table.rows.length;
    this.count.textContent = rows.length < all ? `${Format.count(rows.length)} of ${Format.count(all)}` : "";
  }

  caption() {
    const caption = document.createElement("caption");
    caption.className = "unseen";
    caption.textContent = this.table.title;
    return caption;
  }

  head() {
    const head = document.createElement("thead");
    const row = head.insertRow();
    this.table.columns.forEach(([label, type], column) => {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.className = this.isNumber(type) ? "number" : "";
      const sorted = this.sort.column === column;
      cell.setAttribute("aria-sort", sorted ? (this.sort.down ? "descending" : "ascending") : "none");
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = label;
      button.addEventListener("click", () => this.sortBy(column, type));
      cell.append(button);
      row.append(cell);
    });
    return head;
  }

  sortBy(column, type) {
    const same = this.sort.column === column;
    this.sort = { column, down: same ? !this.sort.down : this.isNumber(type) };
    this.show();
    this.box.querySelectorAll("th button")[column].focus();
  }

  body(rows) {
    const body = document.createElement("tbody");
    const most = this.table.columns.map(([, type], c) =>
      (type === "ns" ? this.table.rows.reduce((m, r) => Math.max(m, r[c] || 0), 0) : 0));
    for (const row of rows) {
      const line = body.insertRow();
      this.table.columns.forEach(([, type], c) => this.fill(line.insertCell(), row[c], type, c, most[c]));
    }
    return body;
  }

  fill(cell, value, type, column, most) {
    if (this.isNumber(type)) cell.className = "number";
    if (value === null || value === "") {
      cell.textContent = "–";
      cell.classList.add("nothing");
    } else if (type === "code") {
      this.fillCode(cell, value, column);
    } else if (type === "kind") {
      cell.className = "kind";
      const swatch = document.createElement("span");
      swatch.className = `swatch bg-${value}`;
      cell.append(swatch, value);
    } else {
      cell.textContent = TYPES[type] ? TYPES[type](value) : value;
      if (type === "ns" && column === this.sort.column && most) {
        cell.classList.add("bar");
        cell.style.setProperty("--share", `${(100 * value) / most}%`);
      }
    }
  }

  fillCode(cell, value, column) {
    cell.className = "code";
    cell.title = value;
    if (column > 0 || !["kernels", "work-on-the-cpu", "operators", "copies", "sync-calls"].includes(this.table.id)) {
      cell.textContent = value;
      return;
    }
    const button = document.createElement("button");
    button.type = "button";
    button.className = "link";
    button.textContent = value;
    button.title = `${value}\n\nShow in the timeline`;
    button.addEventListener("click", () => this.onFind(value));
    cell.append(button);
  }

  more(count) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "more";
    button.textContent = `Show all ${Format.count(count)}`;
    button.addEventListener("click", () => {
      this.all = true;
      this.show();
    });
    return button;
  }

  isNumber(type) {
    return type in TYPES;
  }
}
