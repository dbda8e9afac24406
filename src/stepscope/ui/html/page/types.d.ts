// Types that the page's scripts share. tsc reads this file; no report contains it.

// ---- what Python sends (payload.py, render.py)

/** Words that Python and the page share. */
interface Shared {
  classes: string[]; // classes of events, by number
  classWords: Record<string, string>; // what a tip calls an event of each class
  causes: string[]; // causes of idle gaps, by number
  causeLabels: Record<string, string>;
  collectives: string[]; // kinds of collectives
  stalls: string[]; // causes of stalls, by number
  names: string[]; // words that keep their small letter at the start of a sentence
}

type Columns = Record<string, Uint8Array | Uint32Array | Float64Array>;
type StepMark = [name: string, start: number, dur: number];

interface Lane {
  name: string;
  group: "device" | "host";
  work: boolean;
  idle?: boolean;
  folded: boolean;
  first_row: number;
  rows: number;
  events: number;
}

interface Picture {
  span_ns: number;
  strings: string[];
  lanes: Lane[];
  steps: StepMark[];
  left_out: string;
  flames_left_out: [host: number, device: number];
}

interface TableData {
  id: string;
  title: string;
  columns: [label: string, type: string][];
  rows: any[][];
  sort: number;
  absent: string;
  events: boolean; // its first column names events of the timeline
}

type RankData = { tables: TableData[]; picture?: Picture; columns: Columns };

interface MemoryData {
  left: number; // where the axis begins and ends, in the drawing's own units
  right: number;
  last: number;
  time: number[];
  allocated: number[];
  reserved: number[] | null;
  categories: [string, number[]][];
}

// ---- panes

/** What a pane may ask of the page. */
interface Page {
  pickRank(number: number): void; // show this rank in every pane
  findEvent(name: string): void; // search for an event in the timeline
}

/** What the page may ask of a pane; a pane leaves out what it does not need. */
interface PaneScript {
  ready?: Promise<void>; // resolved when the pane's own data is unpacked
  showRank?(data: RankData | null, problem: string): void; // null when it could not be unpacked
  draw?(): void; // at the next frame, because colours changed
  drawNow?(): void; // at once, for printing
  findEvent?(name: string): void;
  state?(): object; // for tests and scripts
  handle?: Record<string, unknown>; // added to window.stepscope
}

type StartPane = (section: HTMLElement, page: Page) => PaneScript;

// ---- drawing

type Units = [size: number, name: string][];
type Rgb = number[];
type Colors = ReturnType<typeof import("./palette.js").getColors>;
type Ctx = CanvasRenderingContext2D;
type View = { t0: number; t1: number };
type NodeBox = [node: number, x: number, width: number];
type Scene = import("./scene.js").Scene;
type Timeline = import("./timeline.js").Timeline;

/** Which events match a search, in order of time, and how long they kept each side busy. */
type Matches = { mask: Uint8Array; events: number[]; busy: { device: number; host: number } };

/** A lane and where it lies. */
type PlacedLane = { lane: Lane; y: number; height: number; pinned: boolean };

interface Layout {
  lanes: PlacedLane[];
  pinned: number; // height of the lanes that stay in sight
  total: number;
  height: number;
  width: number;
  gapRow: number; // the row of idle gaps, or -1
  top(place: PlacedLane): number;
  placeOf(event: number): PlacedLane;
}

interface Marks {
  hover: number;
  selected: number;
  mask: Uint8Array | null;
  launched(event: number): number[];
}

type TimelineFrame = { ctx: Ctx; colors: Colors; scene: Scene; layout: Layout; view: View; scale: number; marks: Marks };

// ---- the whole run: times in µs

/** Times of the steady steps. */
type Middle = { mean: number; median: number; p99: number };
type ChangeData = [step: number, low: number, high: number, before: number, after: number];

interface SeriesHead extends Middle {
  rank: number;
  attempt: number;
  steps: number;
  drawn: number;
  warm_up: number; // of the drawn ones
  offset: number; // steps of the attempts before this one
  changes: ChangeData[];
}

interface RunData {
  zero_ms: number; // Unix time of the first step, 0 where no clock was read
  unit_us: number; // of the starts
  causes: [id: string, label: string, hint: string][];
  series: SeriesHead[];
  all: Middle;
  bin_low_us: number;
  bin_high_us: number;
  columns: Columns;
}

/** Buckets of `size` steps. Low, high and sum are of steps that are no stalls. */
interface PyramidLevel {
  size: number;
  low: Float32Array;
  high: Float32Array;
  sum: Float64Array;
  calm: Uint32Array;
  stall: (Float32Array | null)[]; // by cause: the longest, 0 where there is none
}

/** What each column of pixels shows; Infinity and 0 stand for nothing. */
interface PixelColumns {
  low: Float32Array;
  high: Float32Array;
  stall: (Float32Array | null)[];
}

type RunSeries = import("./run_series.js").RunSeries;
type RunScene = import("./run_series.js").RunScene;
type Axis1D = "step" | "time";
type ScaleName = "log" | "linear" | "typical";
type LevelScale = { name: ScaleName; low: number; high: number; y(us: number): number };
type MergedChange = { x: number; low: number; high: number; before: number; after: number; ranks: number[] };
type Band = [from: number, to: number];

interface RunFrame {
  ctx: Ctx;
  colors: Colors;
  scene: RunScene;
  shown: RunSeries[];
  view: View;
  width: number;
  height: number;
  scale: LevelScale;
  hidden: Set<number>; // causes that are not drawn
}

// ---- several ranks

interface HeatData {
  ranks: number[];
  hosts: string[]; // in the order of their first ranks
  places: string[]; // of each host in the network: its rack and switch, or ""
  host: number[]; // of each rank: its place among the hosts, or -1
  steps: number[];
  metrics: [id: string, label: string, lookFor: string][];
  stragglers: [rank: number, cause: string][];
  slowHosts: [host: number, cause: string][];
  columns: Columns;
}

type HeatValues = Record<string, Float64Array>;
type HeatScale = { low: number; high: number; cut: boolean; most: number }; // cut: values lie above `high`

type PieceKind = "work" | "input" | "transfer";

/** A piece of the critical path; `place` is its rank's lane, or -1. */
type Piece = { rank: number; start: number; end: number; kind: PieceKind; label: string; place: number };
type PathData = { step: number; start: number; end: number; kinds: PieceKind[]; labels: string[] };

interface LanesData {
  ranks: number[];
  errors: number[]; // of each rank's clock
  reference: number; // the rank whose clock the others are set by
  kinds: string[]; // of collectives
  waiting: boolean[]; // whether ranks wait for each other in a collective of each kind
  span: number;
  steps: [lane: number, number: number, start: number, end: number][];
}

type RankLanesData = { columns: Columns; lanes: LanesData; path?: PathData; stragglers: [number, string][] };
type RankFrame = { ctx: Ctx; colors: Colors; scale: number; x: (time: number) => number };
type JobData = HeatData & Partial<RankLanesData> & { tables: TableData[] };

// ---- what-ifs

/** A control. */
interface Axis {
  id: string;
  now: number;
  labels: string[];
  ticks: string[]; // the labels, shorter
  settings: string[]; // empty where nothing changes
  why?: string; // the reason where it cannot be moved; only workers and links have it
}

interface WhatIfData {
  axes: Axis[];
  scalingAxes: Axis[];
  at: number[]; // the predicted positions, each as one number; the last control runs fastest
  cells: Record<string, any[]>; // one row per position; null where a change refuses
  lines: string[]; // assumptions and refusals, by number
  workers: number; // now
  batch: number | null;
  samples: number | null; // of a step: several batches where gradients accumulate
  limit: number | null;
  onHost: boolean;
  path: string;
  worth: number; // a change of the step that is worth having
  decisive: number; // who needs this share of the step alone is the bottleneck
}

type Peak = { peak: number | null; peak_low: number | null; peak_high: number | null };

/** Times in ms. */
interface Predicted extends Peak {
  step: number;
  low: number;
  high: number;
  stalls: number; // of an average step
  host: number;
  device: number;
  factor: number; // throughput over now
  comm: number;
  exposed: number;
  efficiency: number | null;
  assumed: number[]; // numbers of lines
}

/** The same, where it may not be known. */
type MaybePredicted = Omit<Predicted, "step"> & { step: number | null };

/** A position of one control. */
type Point = Predicted & { label: string; now: boolean; chosen: boolean };

interface PlotOptions {
  size: [width: number, height: number, left: number, right: number, bottom: number];
  levels: [number, string][];
  y(value: number): number;
  values(point: Point): number[]; // middle, low, high
  ideal?(point: Point): number;
  rows: { name: string; text(point: Point): string }[]; // under each point
  words(point: Point): string;
}

// ---- a bench

/** One workload's row: what it is sorted and found by. */
interface BenchValues {
  key: string;
  words: string;
  values: (number | null)[];
}
