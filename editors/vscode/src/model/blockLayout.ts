// Where nested blocks stand: a column for each depth, heights by amount, small ones gathered.

import type { Block } from "../contract";

/** A block on the drawing; `top` and `height` are shares of the whole height. */
export interface PlacedBlock {
  readonly block: Block;
  /** Places among siblings from the top; of gathered blocks, of the first. */
  readonly path: readonly number[];
  readonly depth: number;
  readonly top: number;
  readonly height: number;
  /** Small blocks that stand here together; none for a block of its own. */
  readonly gathered: readonly Block[];
}

export interface LayoutLimits {
  /** Lower blocks are gathered: nobody can read or hit them. */
  readonly lowest: number;
  readonly columns: number;
}

/** Largest first. What children leave of their parent stays free. */
export function layoutBlocks(blocks: readonly Block[], limits: LayoutLimits): PlacedBlock[] {
  return placeSiblings(blocks, total(blocks), { top: 0, height: 1 }, [], limits);
}

interface Space {
  readonly top: number;
  readonly height: number;
}

function placeSiblings(blocks: readonly Block[], whole: number, space: Space, path: readonly number[], limits: LayoutLimits): PlacedBlock[] {
  if (path.length >= limits.columns || blocks.length === 0) return [];
  const scale = space.height / Math.max(whole, total(blocks));
  const ordered = blocks.map((block, place) => ({ block, place })).sort((a, b) => b.block.amount - a.block.amount);
  const readable = ordered.filter(({ block }) => block.amount * scale >= limits.lowest);
  const small = ordered.slice(readable.length);
  const placed: PlacedBlock[] = [];
  let top = space.top;
  for (const { block, place } of readable.concat(small.length === 1 ? small : [])) {
    const height = block.amount * scale;
    const here = [...path, place];
    placed.push({ block, path: here, depth: path.length, top, height, gathered: [] });
    placed.push(...placeSiblings(block.children, block.amount, { top, height }, here, limits));
    top += height;
  }
  if (small.length > 1) placed.push(gather(small, path, top, scale));
  return placed;
}

function gather(small: readonly { block: Block; place: number }[], path: readonly number[], top: number, scale: number): PlacedBlock {
  const blocks = small.map(({ block }) => block);
  const amount = total(blocks);
  const shares = blocks.map((block) => block.share);
  const share = shares.every((one) => one !== null) ? shares.reduce((sum: number, one) => sum + (one ?? 0), 0) : null;
  const block: Block = { name: `${blocks.length} smaller`, amount, share, uri: null, line: null, children: [] };
  return { block, path: [...path, small[0]?.place ?? 0], depth: path.length, top, height: amount * scale, gathered: blocks };
}

const total = (blocks: readonly Block[]): number => blocks.reduce((sum, block) => sum + block.amount, 0);

/** The block at a path, or null when an update has removed it. */
export function blockAt(blocks: readonly Block[], path: readonly number[]): Block | null {
  let siblings = blocks;
  let block: Block | null = null;
  for (const place of path) {
    block = siblings[place] ?? null;
    if (block === null) return null;
    siblings = block.children;
  }
  return block;
}

/** How many columns the blocks can fill. */
export function depthOf(blocks: readonly Block[]): number {
  return blocks.length === 0 ? 0 : 1 + Math.max(...blocks.map((block) => depthOf(block.children)));
}

export type Direction = "up" | "down" | "left" | "right";

/** The block next to one, by arrow keys: down and up within a column, right to its parts, left to its whole. */
export function neighbour(placed: readonly PlacedBlock[], from: PlacedBlock, direction: Direction): PlacedBlock {
  const column = placed.filter(({ depth }) => depth === from.depth);
  const middle = from.top + from.height / 2;
  const others = {
    down: () => column.find(({ top }) => top > from.top),
    up: () => column.findLast(({ top }) => top < from.top),
    right: () => placed.find((one) => one.depth === from.depth + 1 && startsWith(one.path, from.path)),
    left: () => placed.find((one) => one.depth === from.depth - 1 && one.top <= middle && middle <= one.top + one.height),
  };
  return others[direction]() ?? from;
}

const startsWith = (path: readonly number[], start: readonly number[]): boolean => start.every((place, i) => path[i] === place);
