// A flame graph that hangs from the top: width is time, depth is the call stack.

const FLAME_ROW = 18;

class FlameTree {
  constructor(columns, prefix, strings) {
    this.strings = strings;
    this.parent = Int32Array.from(columns[`${prefix}_parent`], (p) => p - 1);
    this.name = columns[`${prefix}_name`];
    this.kind = columns[`${prefix}_kind`];
    this.count = columns[`${prefix}_count`];
    this.total = columns[`${prefix}_total`];
    this.self = columns[`${prefix}_self`];
    this.size = this.parent.length;
    this.layOut();
  }

  // Parents come before their children, so one pass over nodes by width places them all.
  layOut() {
    const { size, parent, total } = this;
    this.depth = new Uint16Array(size);
    this.x = new Float64Array(size);
    this.whole = 0;
    for (let i = 0; i < size; i++) this.depth[i] = parent[i] < 0 ? 0 : this.depth[parent[i]] + 1;
    const order = Array.from({ length: size }, (_, i) => i);
    // Roots keep their order, the main thread first: idle threads are wide and say little.
    order.sort((a, b) => this.depth[a] - this.depth[b] || (this.depth[a] && total[b] - total[a]) || a - b);
    const used = new Float64Array(size);
    for (const i of order) {
      const above = parent[i];
      if (above < 0) {
        this.x[i] = this.whole;
        this.whole += total[i];
      } else {
        this.x[i] = this.x[above] + used[above];
        used[above] += total[i];
      }
    }
    this.order = order;
    this.deepest = size ? this.depth[order[size - 1]] : 0;
  }

  label(node) {
    return this.strings[this.name[node]];
  }
}

class FlameGraph {
  constructor(root) {
    this.root = root;
    this.canvas = root.querySelector("canvas");
    this.tip = root.querySelector(".tip");
    this.search = root.querySelector("input");
    this.found = root.querySelector(".flame-count");
    this.crumb = root.querySelector(".flame-crumb");
    this.resetButton = root.querySelector("[data-flame-reset]");
    this.hover = -1;
    this.zoomed = -1;
    this.canvas.addEventListener("pointermove", (e) => this.move(e));
    this.canvas.addEventListener("pointerleave", () => this.setHover(-1));
    this.canvas.addEventListener("click", (e) => this.zoom(this.nodeAt(e)));
    this.canvas.addEventListener("keydown", (e) => this.key(e));
    this.resetButton.addEventListener("click", () => this.zoom(-1));
    this.search.addEventListener("input", () => this.runSearch());
    new ResizeObserver(() => this.draw()).observe(root);
  }

  load(tree) {
    this.tree = tree;
    this.zoomed = this.hover = -1;
    this.runSearch();
    this.zoom(-1);
  }

  zoom(node) {
    if (node === this.zoomed && node >= 0) node = this.tree.parent[node];
    this.zoomed = node;
    this.resetButton.disabled = node < 0;
    this.crumb.textContent = node < 0 ? "" : `${this.tree.label(node)} · ${this.share(node)}`;
    this.draw();
  }

  key(event) {
    const { tree } = this;
    if (event.key === "Escape" || event.key === "ArrowUp") this.zoom(this.zoomed < 0 ? -1 : tree.parent[this.zoomed]);
    else if (event.key === "ArrowDown" || event.key === "Enter") {
      const child = tree.order.find((node) => tree.parent[node] === this.zoomed);
      if (child !== undefined) this.zoom(child);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  share(node) {
    return `${Format.ns(this.tree.total[node])}, ${Format.percent(this.tree.total[node] / this.tree.whole)} of all`;
  }

  window() {
    const { tree, zoomed } = this;
    return zoomed < 0 ? { from: 0, length: tree.whole } : { from: tree.x[zoomed], length: tree.total[zoomed] };
  }

  draw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.drawNow();
    });
  }

  // Nodes in view with their boxes; those above the zoomed one span the whole width.
  boxes(width) {
    const { tree } = this;
    const { from, length } = this.window();
    const scale = width / Math.max(length, 1);
    const out = [];
    for (const i of tree.order) {
      let x = (tree.x[i] - from) * scale;
      let w = tree.total[i] * scale;
      if (x >= width - 1e-6 || x + w <= 1e-6 || w < 0.4) continue;
      if (x < 0) [x, w] = [0, w + x];
      out.push([i, x, Math.min(w, width - x)]);
    }
    return out;
  }

  drawNow() {
    const { tree } = this;
    const width = this.canvas.parentElement.clientWidth;
    if (!tree || !tree.size || !width) return;
    const colors = Palette.get();
    const shown = this.boxes(width);
    const depth = shown.reduce((most, [i]) => Math.max(most, tree.depth[i]), 0) + 1;
    const ctx = sizeCanvas(this.canvas, width, depth * FLAME_ROW + 2);
    ctx.fillStyle = colors.back;
    ctx.fillRect(0, 0, width, depth * FLAME_ROW + 2);
    ctx.font = `11px ${colors.font}`;
    ctx.textBaseline = "middle";
    this.letter = letterWidth(ctx);
    this.shown = shown;
    for (const [i, x, w] of shown) this.drawNode(ctx, colors, i, x, w);
    if (this.hover >= 0) this.outline(ctx, colors);
  }

  drawNode(ctx, colors, i, x, w) {
    const { tree } = this;
    const y = tree.depth[i] * FLAME_ROW;
    const dim = this.mask && !this.mask[i];
    const level = dim ? 0 : Palette.LEVELS - 1;
    const above = this.zoomed >= 0 && i !== this.zoomed && tree.depth[i] < tree.depth[this.zoomed];
    ctx.fillStyle = colors.fills[Palette.fill(tree.kind[i], tree.name[i] % Palette.VARIANTS, above ? 0 : level)];
    ctx.fillRect(x, y, Math.max(w - 0.6, 0.5), FLAME_ROW - 1.5);
    if (w < 26) return;
    const text = fitText(Format.short(tree.label(i)), w - 8, this.letter);
    ctx.fillStyle = dim || above ? colors.muted : colors.inks[tree.kind[i]];
    ctx.fillText(text, x + 4, y + FLAME_ROW / 2 - 0.5);
  }

  outline(ctx, colors) {
    const box = this.shown.find(([i]) => i === this.hover);
    if (!box) return;
    ctx.strokeStyle = colors.text;
    ctx.lineWidth = 1.25;
    ctx.strokeRect(box[1] + 0.5, this.tree.depth[this.hover] * FLAME_ROW + 0.5, Math.max(box[2] - 1.5, 1), FLAME_ROW - 2);
  }

  nodeAt(event) {
    const depth = Math.floor(event.offsetY / FLAME_ROW);
    const hit = (this.shown || []).find(([i, x, w]) =>
      this.tree.depth[i] === depth && event.offsetX >= x && event.offsetX < x + Math.max(w, 1));
    return hit ? hit[0] : -1;
  }

  move(event) {
    const node = this.nodeAt(event);
    const changed = node !== this.hover;
    this.setHover(node);
    if (node < 0) return;
    if (changed) this.fillTip(node);
    placeTip(this.tip, event);
  }

  fillTip(node) {
    const { tree } = this;
    const times = `${this.share(node)}  ·  self ${Format.ns(tree.self[node])}  ·  ${Format.count(tree.count[node])}×`;
    this.tip.replaceChildren(tipTitle(tree.label(node)), element("div", "", times));
    if (this.zoomed >= 0) {
      const part = Format.percent(tree.total[node] / tree.total[this.zoomed]);
      this.tip.append(element("div", "", `${part} of ${Format.short(tree.label(this.zoomed))}`));
    }
    this.tip.hidden = false;
  }

  setHover(node) {
    if (node < 0) this.tip.hidden = true;
    if (node === this.hover) return;
    this.hover = node;
    this.canvas.classList.toggle("is-over", node >= 0);
    this.draw();
  }

  runSearch() {
    const { tree } = this;
    if (!tree) return;
    const text = this.search.value.trim().toLowerCase();
    this.mask = null;
    this.found.textContent = "";
    if (text) {
      const named = tree.strings.map((name) => name.toLowerCase().includes(text));
      this.mask = Uint8Array.from(tree.name, (code) => (named[code] ? 1 : 0));
      this.found.textContent = this.foundText();
    }
    this.draw();
  }

  // A match inside a match adds nothing: its time is already counted.
  foundText() {
    const { tree, mask } = this;
    const inside = new Uint8Array(tree.size);
    let sum = 0;
    for (let i = 0; i < tree.size; i++) {
      const above = tree.parent[i];
      inside[i] = above >= 0 && (inside[above] || mask[above]) ? 1 : 0;
      if (mask[i] && !inside[i]) sum += tree.total[i];
    }
    return sum ? `${Format.ns(sum)}, ${Format.percent(sum / tree.whole)} of all` : "no match";
  }
}
