// What the panel says, as text. Figures are written by the report's own code.

import { milliseconds, percent, significant, size } from "../../../../src/stepscope/ui/html/page/format.js";
import type { Block, GpuRow, Live, Panel } from "../contract";
import type { Shown } from "../messages";
import type { Interval } from "./batchCurve";
import type { PlacedBlock } from "./blockLayout";

export { milliseconds, percent, size };

export const perSecond = (value: number): string => `${significant(value)} samples/s`;

/** "31.9 ms (30.1 to 33.8 ms)"; the interval only where there is one. */
export function withInterval(amount: Interval, write: (value: number) => string): string {
  const [value, low, high] = [amount.value, amount.low, amount.high].map(write) as [string, string, string];
  if (low === high) return value;
  const unit = / \S+$/.exec(high)?.[0] ?? "";
  const start = unit !== "" && low.endsWith(unit) ? low.slice(0, -unit.length) : low;
  return `${value} (${start} to ${high})`;
}

const STATES = {
  measured: "measured",
  estimated: "estimated, not yet measured",
  stale: "measured before the last edits",
  none: "not measured yet",
} as const;

export const stateWords = (panel: Panel): string => STATES[panel.state];

/** The step's time and its interval. */
export function stepWords(panel: Panel): string | null {
  if (panel.stepMs === null) return null;
  const step = { value: panel.stepMs, low: panel.lowMs ?? panel.stepMs, high: panel.highMs ?? panel.stepMs };
  return `${withInterval(step, milliseconds)} a step`;
}

/** The badge of a running training. */
export function liveWords(live: Live): string {
  const parts = [
    live.step === null ? null : `step ${live.step.toLocaleString("en-US")}`,
    live.stepMs === null ? null : milliseconds(live.stepMs),
    live.samplesPerSecond === null ? null : perSecond(live.samplesPerSecond),
    live.message,
  ].filter((part) => part !== null);
  return parts.length > 0 ? parts.join(" · ") : "starting";
}

export type Unit = "ms" | "bytes";

export const amountWords = (block: Block, unit: Unit): string => (unit === "ms" ? milliseconds(block.amount) : size(block.amount));

export const shareWords = (block: Block): string => (block.share === null ? "" : percent(block.share));

/** Everything about a block that its few pixels cannot say. */
export function blockTip({ block, gathered }: Pick<PlacedBlock, "block" | "gathered">, unit: Unit): string {
  const [first, rest] = [gathered.slice(0, MOST_IN_TIP), gathered.length - MOST_IN_TIP];
  const lines = [
    block.name,
    [amountWords(block, unit), shareWords(block)].filter((part) => part !== "").join(" · "),
    ...first.map((one) => `${one.name}: ${amountWords(one, unit)}`),
    rest > 0 ? `and ${rest} more` : "",
    block.line === null ? "" : `line ${block.line + 1}`,
    block.children.length > 0 ? "double click: look inside" : "",
  ];
  return lines.filter((line) => line !== "").join("\n");
}

const MOST_IN_TIP = 12;

/** Gives the memory its meaning: "1.23 GB of 80.0 GB", or only the first where the size is not known. */
export const ofCapacity = (text: string, capacityBytes: number | null): string =>
  capacityBytes === null ? text : `${text} of ${size(capacityBytes)}`;

/** Why the batch cannot be dragged, and where it can be changed. */
export function whyNoBars(panel: Panel): string {
  if (panel.batch !== null) return "No other batch size can be predicted yet: profile the script first.";
  const place = panel.batchElsewhere;
  if (place === null) return "No batch size was found in the code: there is nothing to drag.";
  return `The batch size is set in another file, so you cannot drag it: ${place.name} ${place.value} in line ${place.line + 1} of ${fileName(place.uri)}. Change it there and profile again.`;
}

export interface GpuWords {
  readonly gpu: string;
  readonly step: string;
  readonly interval: string;
  readonly fits: string;
  readonly decides: string;
}

/** Fastest first; what does not fit comes last. */
export function gpuTable(rows: readonly GpuRow[]): GpuWords[] {
  const order = [...rows].sort((a, b) => Number(a.fits === false) - Number(b.fits === false) || a.stepMs - b.stepMs);
  return order.map((row) => ({
    gpu: row.gpu,
    step: milliseconds(row.stepMs),
    interval: row.lowMs === null || row.highMs === null ? "" : `${significant(row.lowMs)} to ${milliseconds(row.highMs)}`,
    fits: row.fits === null ? "not known" : row.fits ? "fits" : "does not fit",
    decides: row.decides ?? "not known",
  }));
}

/** The status bar: the step as far as it is known, and how. */
export function statusWords({ panel, live, problem }: Pick<Shown, "panel" | "live" | "problem">): string | null {
  if (problem !== null) return "$(warning) stepscope";
  if (live?.running) return `$(pulse) ${withoutIcons(liveWords(live))}`;
  if (panel === null || panel.stepMs === null) return null;
  const mark = { measured: "", estimated: "≈ ", stale: "≈ ", none: "≈ " }[panel.state];
  return `$(watch) ${mark}${milliseconds(panel.stepMs)} a step`;
}

/** VS Code draws $(name) as an icon; a script's words are only words. */
const withoutIcons = (text: string): string => text.replaceAll("$(", "$ (");

/** The last part of a document's address. */
export function fileName(uri: string): string {
  const last = uri.slice(uri.lastIndexOf("/") + 1);
  try {
    return decodeURIComponent(last);
  } catch {
    return last;
  }
}
