// Run time or memory as nested blocks: a click jumps to the line, a double click looks inside.

import type { Block } from "../contract";
import { blockAt, depthOf, layoutBlocks, neighbour, type Direction, type PlacedBlock } from "../model/blockLayout";
import { amountWords, blockTip, shareWords, type Unit } from "../model/words";
import { button, element, place, section, share } from "./elements";

const HUES = 5;
const COLUMNS = 3;
/** Pixels below which a block cannot be read; the drawing's height is fixed in panel.css. */
const LOWEST = 16 / 360;

const DIRECTIONS: Readonly<Record<string, Direction>> = { ArrowUp: "up", ArrowDown: "down", ArrowLeft: "left", ArrowRight: "right" };

export interface BreakdownOptions {
  readonly title: string;
  readonly unit: Unit;
  readonly blocks: readonly Block[];
  readonly jump: (uri: string, line: number) => void;
  /** The block that is looked into, by its path. */
  readonly inside: readonly number[];
  readonly lookInside: (path: readonly number[]) => void;
}

/** The section, or null when there is nothing to show. */
export function breakdown(options: BreakdownOptions): HTMLElement | null {
  if (options.blocks.length === 0) return null;
  const whole = options.inside.length > 0 ? blockAt(options.blocks, options.inside) : null;
  const blocks = whole === null ? options.blocks : [whole];
  const start = whole === null ? [] : options.inside.slice(0, -1);
  const columns = Math.min(COLUMNS, depthOf(blocks));
  const placed = layoutBlocks(blocks, { lowest: LOWEST, columns });
  const drawing = element("div", "blocks");
  drawing.setAttribute("role", "tree");
  drawing.setAttribute("aria-label", options.title);
  const parts = placed.map((one) => blockPart(one, columns, options, () => absolute(one, whole, start, options.inside)));
  parts.forEach((part, i) => {
    part.tabIndex = i === 0 ? 0 : -1;
    part.addEventListener("keydown", (event) => moveFocus(event, placed, parts, i));
  });
  drawing.append(...parts);
  return section(options.title, ...(whole === null ? [] : [pathBack(options)]), drawing);
}

/** The path in all blocks of one that was placed among those looked into. */
function absolute(one: PlacedBlock, whole: Block | null, start: readonly number[], inside: readonly number[]): readonly number[] {
  return whole === null ? one.path : [...start, inside.at(-1) ?? 0, ...one.path.slice(1)];
}

function pathBack(options: BreakdownOptions): HTMLElement {
  const steps = options.inside.map((_, i) => options.inside.slice(0, i + 1));
  const names = steps.map((path) => button(blockAt(options.blocks, path)?.name ?? "", () => options.lookInside(path), "link"));
  const back = element("nav", "path", button("all", () => options.lookInside([]), "link"));
  back.append(...names.flatMap((name) => [" › ", name]));
  return back;
}

function blockPart(one: PlacedBlock, columns: number, options: BreakdownOptions, pathOf: () => readonly number[]): HTMLElement {
  const { block } = one;
  const part = element("div", `block hue-${(pathOf()[0] ?? 0) % HUES}`, element("span", "name", block.name),
    element("span", "amount", amountWords(block, options.unit)), element("span", "share", shareWords(block)));
  const last = one.depth === columns - 1 || block.children.length === 0;
  place(part, {
    top: share(one.top), height: share(one.height), left: share(one.depth / columns),
    width: share(last ? 1 - one.depth / columns : 1 / columns), "--depth": String(one.depth),
  });
  const { uri, line } = block;
  const target = uri !== null && line !== null ? { uri, line } : null;
  part.setAttribute("role", "treeitem");
  part.setAttribute("aria-level", String(one.depth + 1));
  part.title = blockTip(one, options.unit);
  part.classList.toggle("tall", one.height >= 2 * LOWEST);
  part.classList.toggle("taller", one.height >= 3 * LOWEST);
  if (one.gathered.length > 0) part.classList.add("gathered");
  const jump = (): void => { if (target !== null) options.jump(target.uri, target.line); };
  const open = (): void => { if (block.children.length > 0) options.lookInside(pathOf()); };
  if (target !== null) part.classList.add("jumps");
  part.addEventListener("click", jump);
  part.addEventListener("dblclick", open);
  part.addEventListener("keydown", (event) => {
    if (event.key === "Enter") jump();
    else if (event.key === " ") open();
    else if (event.key === "Escape") options.lookInside([]);
    else return;
    event.preventDefault();
  });
  return part;
}

function moveFocus(event: KeyboardEvent, placed: readonly PlacedBlock[], parts: readonly HTMLElement[], from: number): void {
  const direction = DIRECTIONS[event.key];
  const here = placed[from];
  if (direction === undefined || here === undefined) return;
  event.preventDefault();
  const next = parts[placed.indexOf(neighbour(placed, here, direction))];
  for (const part of parts) part.tabIndex = part === next ? 0 : -1;
  next?.focus();
}
