// Why steps stall: the flame graph of stalled steps, coloured by how they differ from typical ones.

import { fitText, writeText } from "./canvas.js";
import { partIn, partsIn } from "./dom.js";
import { FlameGraph, FlameTree } from "./flame_graph.js";
import { counted, duration, percent, shortName } from "./format.js";
import { DIFFS } from "./palette.js";
import { decodeBlock, unpackProblem } from "./payload.js";

const OWN = 1; // the kind of frames of the user's own code

/** Widths are the time in a stalled step; `typical` is the time in a typical one. */
export class DifferenceTree extends FlameTree {
  /** @param {Columns} columns @param {string} cause @param {string[]} strings */
  constructor(columns, cause, strings) {
    super(columns, cause, strings);
    this.typical = columns[`${cause}_typical`];
    this.most = Math.max(1, ...Array.from(this.total, (_, i) => Math.abs(this.more(i))));
  }

  more(/** @type {number} */ node) { return this.total[node] - this.typical[node]; }

  /** Its place among the shades: the largest difference of all has the fullest colour. @param {number} node */
  shade(node) { return DIFFS + Math.round((DIFFS * this.more(node)) / this.most); }

  isOwn(/** @type {number} */ node) { return this.kind[node] === OWN; }
}

/** "149 ms more than in a typical step". @param {DifferenceTree} tree @param {number} node */
export function moreWords(tree, node) {
  const more = tree.more(node);
  if (Math.abs(more) < 0.01 * tree.most) return "as long as in a typical step";
  return `${duration(Math.abs(more))} ${more > 0 ? "more" : "less"} than in a typical step`;
}

/** The user's own lines begin with their place: that is what to look up. @param {DifferenceTree} tree @param {number} node */
export function nodeWords(tree, node) {
  const name = shortName(tree.label(node));
  if (!tree.isOwn(node)) return name;
  const more = tree.more(node);
  const signed = Math.abs(more) < 0.01 * tree.most ? "" : `  ${more > 0 ? "+" : "−"}${duration(Math.abs(more))}`;
  return name.split("  ").reverse().join(" ") + signed;
}

class DifferenceGraph extends FlameGraph {
  /** @override @param {Colors} colors @param {DifferenceTree} tree @param {number} i @param {boolean} dim */
  paint(colors, tree, i, dim) {
    const { fill, ink, dim: pale } = colors.diff[tree.shade(i)];
    return dim ? { fill: pale, ink: colors.muted } : { fill, ink };
  }

  /** @override @param {Ctx} ctx @param {string} ink @param {DifferenceTree} tree @param {number} i @param {number} x @param {number} y @param {number} width */
  write(ctx, ink, tree, i, x, y, width) {
    const { font } = ctx;
    if (tree.isOwn(i)) ctx.font = `bold ${font}`;
    writeText(ctx, ink, fitText(ctx, nodeWords(tree, i), tree.isOwn(i) ? 0.93 * width : width), x, y);
    ctx.font = font;
  }

  /** @override @param {DifferenceTree} tree @param {number} node */
  crumbText(tree, node) { return this.words(tree, node).join(" · "); }

  /** @override @param {number} node */
  tipText(node) { return this.tree ? this.words(/** @type {DifferenceTree} */ (this.tree), node) : []; }

  /** @param {DifferenceTree} tree @param {number} node */
  words(tree, node) {
    const share = `${duration(tree.total[node])} of a stalled step, ${percent(tree.total[node] / tree.whole)} of it`;
    return [tree.label(node), share, moreWords(tree, node), `${counted(tree.count[node], "sample")}, self ${duration(tree.self[node])}`];
  }
}

/** The cause whose stacks are shown, and the table that chooses it. */
export class StallFlames {
  /** @param {HTMLElement} section */
  constructor(section) {
    this.root = partIn(section, ".run-why");
    this.rows = partsIn(section, "tr[data-cause]");
    this.graph = new DifferenceGraph(this.root);
    this.trees = /** @type {Record<string, DifferenceTree>} */ ({});
    this.chosen = this.rows[0].dataset.cause ?? "";
    this.rows.forEach((row) => row.addEventListener("click", (event) => {
      if (!(/** @type {Element} */ (event.target)).closest(".run-jump")) this.choose(row.dataset.cause ?? "");
    }));
  }

  async load() {
    const block = this.root.querySelector("#payload-stalls");
    if (block) {
      try {
        const { columns, strings } = await decodeBlock(block.textContent ?? "");
        for (const part of partsIn(this.root, "[data-sampled]")) {
          const cause = part.dataset.reason ?? "";
          this.trees[cause] = new DifferenceTree(columns, cause, strings);
        }
      } catch (error) {
        partIn(this.root, ".flame-count").textContent = unpackProblem(error);
      }
    }
    this.choose(this.chosen);
  }

  choose(/** @type {string} */ cause) {
    this.chosen = cause;
    for (const row of this.rows) {
      const pressed = row.dataset.cause === cause;
      row.classList.toggle("is-chosen", pressed);
      partIn(row, ".run-choose").setAttribute("aria-pressed", String(pressed));
    }
    for (const part of partsIn(this.root, "[data-reason]")) {
      part.hidden = part.dataset.reason !== cause;
      if (!part.hidden) partIn(this.root, ".run-why-cause").textContent = part.dataset.label ?? "";
    }
    this.show(this.trees[cause]);
  }

  show(/** @type {DifferenceTree | undefined} */ tree) {
    partsIn(this.root, ".run-why-graph, .search, [data-flame-reset]").forEach((part) => { part.hidden = !tree; });
    partIn(this.root, ".run-why-most").textContent = tree ? `, by up to ${duration(tree.most)}` : "";
    if (tree) this.graph.load(tree);
  }
}
