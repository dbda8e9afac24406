// Names and shapes of what the language server and the editor exchange beside the standard methods.

export const PANEL_REQUEST = "stepscope/panel";
export const CHANGED_NOTIFICATION = "stepscope/changed";
export const LIVE_NOTIFICATION = "stepscope/live";

export const PROFILE = "stepscope.profile";
export const STOP = "stepscope.stop";
export const PROFILE_ON_SAVE = "stepscope.profileOnSave";
export const SET_BATCH = "stepscope.setBatch";
export const OPEN_REPORT = "stepscope.openReport";
export const SERVER_COMMANDS = [PROFILE, STOP, PROFILE_ON_SAVE, SET_BATCH, OPEN_REPORT] as const;

export const SETTINGS_SECTION = "stepscope";
export const SETTINGS = ["python", "arguments", "profileOnSave", "limitSeconds", "hints"] as const;

const STATES = ["measured", "estimated", "stale", "none"] as const;
export type PanelState = (typeof STATES)[number];

export interface BatchPoint {
  readonly batch: number;
  readonly stepMs: number;
  readonly lowMs: number;
  readonly highMs: number;
  readonly samplesPerSecond: number | null;
  readonly peakBytes: number | null;
  readonly peakLowBytes: number | null;
  readonly peakHighBytes: number | null;
}

export interface Batch {
  readonly value: number;
  /** Counted from 0, as the protocol does. */
  readonly line: number;
  readonly points: readonly BatchPoint[];
}

/** The number that sets the batch size, in another file than the script: it is not dragged. */
export interface BatchElsewhere {
  readonly uri: string;
  readonly line: number;
  readonly name: string;
  readonly value: number;
}

/** A part of the step's time or of the memory at its peak. */
export interface Block {
  readonly name: string;
  /** Milliseconds or bytes. */
  readonly amount: number;
  readonly share: number | null;
  readonly uri: string | null;
  readonly line: number | null;
  readonly children: readonly Block[];
}

export interface GpuRow {
  readonly gpu: string;
  readonly stepMs: number;
  readonly lowMs: number | null;
  readonly highMs: number | null;
  readonly fits: boolean | null;
  readonly decides: string | null;
}

export interface Panel {
  readonly state: PanelState;
  readonly verdict: string | null;
  readonly stepMs: number | null;
  readonly lowMs: number | null;
  readonly highMs: number | null;
  readonly samplesPerSecond: number | null;
  readonly peakBytes: number | null;
  readonly capacityBytes: number | null;
  readonly batch: Batch | null;
  readonly batchElsewhere: BatchElsewhere | null;
  readonly time: readonly Block[];
  readonly memory: readonly Block[];
  readonly gpus: readonly GpuRow[];
  readonly report: string | null;
  readonly runningSince: string | null;
  readonly error: string | null;
}

/** What a running training did last. */
export interface Live {
  readonly uri: string;
  readonly running: boolean;
  readonly step: number | null;
  readonly stepMs: number | null;
  readonly samplesPerSecond: number | null;
  readonly message: string | null;
}

/** The server sent something that the contract does not know. */
export class ContractError extends Error {}

type Fields = Readonly<Record<string, unknown>>;

function fields(value: unknown, what: string): Fields {
  if (typeof value === "object" && value !== null && !Array.isArray(value)) return value as Fields;
  throw new ContractError(`${what} is not an object: update stepscope and this extension to the same version`);
}

const finite = (value: unknown): number | null => (typeof value === "number" && Number.isFinite(value) ? value : null);
const positive = (value: unknown): number | null => (typeof value === "number" && Number.isFinite(value) && value > 0 ? value : null);
const wholeLine = (value: unknown): number | null => (Number.isInteger(value) && (value as number) >= 0 ? (value as number) : null);
const text = (value: unknown): string | null => (typeof value === "string" && value !== "" ? value : null);
const list = (value: unknown): readonly unknown[] => (Array.isArray(value) ? value : []);
const present = <T>(value: T | null): value is T => value !== null;

function readPoint(value: unknown): BatchPoint | null {
  const point = fields(value, "a point of the batch curve");
  const [batch, stepMs] = [positive(point["batch"]), positive(point["stepMs"])];
  if (batch === null || stepMs === null) return null;
  const peakBytes = positive(point["peakBytes"]);
  return {
    batch, stepMs, peakBytes,
    lowMs: positive(point["lowMs"]) ?? stepMs,
    highMs: positive(point["highMs"]) ?? stepMs,
    samplesPerSecond: positive(point["samplesPerSecond"]),
    peakLowBytes: positive(point["peakLowBytes"]) ?? peakBytes,
    peakHighBytes: positive(point["peakHighBytes"]) ?? peakBytes,
  };
}

/** Points in the order of their batch, each batch once; without two of them there is nothing to drag. */
function readBatch(value: unknown): Batch | null {
  if (value === null || value === undefined) return null;
  const batch = fields(value, "the panel's batch");
  const [number, line] = [positive(batch["value"]), wholeLine(batch["line"])];
  if (number === null || line === null) return null;
  const byBatch = new Map(list(batch["points"]).map(readPoint).filter(present).map((point) => [point.batch, point]));
  const points = [...byBatch.values()].sort((a, b) => a.batch - b.batch);
  return { value: number, line, points };
}

function readBatchElsewhere(value: unknown): BatchElsewhere | null {
  if (value === null || value === undefined) return null;
  const place = fields(value, "the panel's batchElsewhere");
  const [uri, line, name, number] = [text(place["uri"]), wholeLine(place["line"]), text(place["name"]), positive(place["value"])];
  return uri === null || line === null || name === null || number === null ? null : { uri, line, name, value: number };
}

/** Deeper than this, a block's children are left out: no program nests so far, but a broken one may. */
const DEEPEST = 64;

function readBlock(value: unknown, unit: "ms" | "bytes", depth = 0): Block | null {
  const block = fields(value, "a block of the panel");
  const amount = positive(block[unit]);
  if (amount === null) return null;
  const children = depth < DEEPEST ? list(block["children"]) : [];
  return {
    name: text(block["name"]) ?? "(no name)",
    amount,
    share: finite(block["share"]),
    uri: text(block["uri"]),
    line: wholeLine(block["line"]),
    children: children.map((child) => readBlock(child, unit, depth + 1)).filter(present),
  };
}

function readGpu(value: unknown): GpuRow | null {
  const row = fields(value, "a row of the GPU table");
  const [gpu, stepMs] = [text(row["gpu"]), positive(row["stepMs"])];
  if (gpu === null || stepMs === null) return null;
  const fits = row["fits"];
  return {
    gpu, stepMs,
    lowMs: positive(row["lowMs"]),
    highMs: positive(row["highMs"]),
    fits: typeof fits === "boolean" ? fits : null,
    decides: text(row["decides"]),
  };
}

/** The answer to `stepscope/panel`, with what is missing or unknown as null. */
export function readPanel(value: unknown): Panel {
  const panel = fields(value, "the answer to stepscope/panel");
  const state = STATES.find((known) => known === panel["state"]);
  if (state === undefined) throw new ContractError(`the panel's state ${JSON.stringify(panel["state"])} is not known: update this extension`);
  return {
    state,
    verdict: text(panel["verdict"]),
    stepMs: positive(panel["stepMs"]),
    lowMs: positive(panel["lowMs"]),
    highMs: positive(panel["highMs"]),
    samplesPerSecond: positive(panel["samplesPerSecond"]),
    peakBytes: positive(panel["peakBytes"]),
    capacityBytes: positive(panel["capacityBytes"]),
    batch: readBatch(panel["batch"]),
    batchElsewhere: readBatchElsewhere(panel["batchElsewhere"]),
    time: list(panel["time"]).map((block) => readBlock(block, "ms")).filter(present),
    memory: list(panel["memory"]).map((block) => readBlock(block, "bytes")).filter(present),
    gpus: list(panel["gpus"]).map(readGpu).filter(present),
    report: text(panel["report"]),
    runningSince: text(panel["runningSince"]),
    error: text(panel["error"]),
  };
}

/** The document that a `stepscope/changed` is about. */
export function readChanged(value: unknown): string {
  const uri = text(fields(value, "stepscope/changed")["uri"]);
  if (uri === null) throw new ContractError("stepscope/changed names no document");
  return uri;
}

export function readLive(value: unknown): Live {
  const live = fields(value, "stepscope/live");
  const uri = text(live["uri"]);
  if (uri === null) throw new ContractError("stepscope/live names no document");
  return {
    uri,
    running: live["running"] === true,
    step: wholeLine(live["step"]),
    stepMs: positive(live["stepMs"]),
    samplesPerSecond: positive(live["samplesPerSecond"]),
    message: text(live["message"]),
  };
}
