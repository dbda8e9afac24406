// The events of one rank, arranged for binary search. Idle gaps are a row like any other.

import { shortName } from "./format.js";
import { FIRST_CAUSE } from "./palette.js";
import { unzigzag } from "./payload.js";
import { SHARED } from "./shared.js";

/** The first place from `low` on whose value is not below `value`. @param {ArrayLike<number>} array @param {number} value @param {number} low @param {number} high */
export function lowerBound(array, value, low, high) {
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (array[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

export class Scene {
  /** @param {Picture} picture @param {Columns} columns */
  constructor(picture, columns) {
    this.span = Math.max(picture.span_ns, 1);
    this.steps = picture.steps;
    this.strings = [...picture.strings];
    this.leftOut = picture.left_out;
    this.lanes = picture.lanes.map((lane) => ({ ...lane, folded: false }));
    const gaps = columns.gap_start.length;
    const size = columns.dur.length;
    const total = size + gaps;
    this.drawn = size;
    this.rowStart = [...columns.row_start];
    this.start = new Float64Array(total);
    this.dur = new Float64Array(total);
    this.name = new Uint32Array(total);
    this.kind = new Uint8Array(total);
    this.link = new Int32Array(total).fill(-1);
    this.frame = columns.gap_frame;
    this.shortened = /** @type {string[]} */ ([]);
    this.fillEvents(columns);
    if (gaps) this.addGapLane(columns, gaps);
    this.rows = this.rowStart.length - 1;
    this.laneOfRow = new Uint32Array(this.rows);
    this.lanes.forEach((lane, i) => this.laneOfRow.fill(i, lane.first_row, lane.first_row + lane.rows));
    this.latestEnd = this.indexRows();
    this.launches = this.indexLaunches();
  }

  fillEvents(/** @type {Columns} */ columns) {
    this.dur.set(columns.dur);
    this.name.set(columns.name);
    this.kind.set(columns.kind);
    for (let row = 0; row + 1 < this.rowStart.length; row++) {
      let time = 0;
      for (let i = this.rowStart[row]; i < this.rowStart[row + 1]; i++) this.start[i] = (time += unzigzag(columns.start_delta[i]));
    }
    let link = -1;
    for (let i = 0; i < this.drawn; i++) this.link[i] = (link += unzigzag(columns.link[i]));
  }

  /** @param {Columns} columns @param {number} gaps */
  addGapLane(columns, gaps) {
    const size = this.drawn;
    this.start.set(columns.gap_start, size);
    this.dur.set(columns.gap_dur, size);
    const first = this.strings.length;
    SHARED.causes.forEach((cause) => this.strings.push(SHARED.causeLabels[cause] || cause));
    for (let i = 0; i < gaps; i++) {
      this.name[size + i] = first + columns.gap_cause[i];
      this.kind[size + i] = FIRST_CAUSE + columns.gap_cause[i];
    }
    this.lanes.unshift({
      name: "Idle, by cause", group: "device", work: false, idle: true, folded: false,
      first_row: this.rowStart.length - 1, rows: 1, events: gaps,
    });
    this.rowStart.push(size + gaps);
  }

  /** The latest end so far in each row: sorted even where events overlap. */
  indexRows() {
    const latest = new Float64Array(this.start.length);
    for (let row = 0; row < this.rows; row++) {
      let end = -Infinity;
      for (let i = this.rowStart[row]; i < this.rowStart[row + 1]; i++) {
        end = Math.max(end, this.end(i));
        latest[i] = end;
      }
    }
    return latest;
  }

  /** Device events of each lane by the time of their launch: what an operator launched is a range. */
  indexLaunches() {
    const perLane = this.lanes.map(() => /** @type {number[]} */ ([]));
    for (let i = 0; i < this.drawn; i++) {
      if (this.link[i] >= 0) perLane[this.laneOfRow[this.rowOf(this.link[i])]].push(i);
    }
    return perLane.map((events) => {
      events.sort((a, b) => this.start[this.link[a]] - this.start[this.link[b]]);
      return { events, times: Float64Array.from(events, (event) => this.start[this.link[event]]) };
    });
  }

  end(/** @type {number} */ event) { return this.start[event] + this.dur[event]; }

  rowOf(/** @type {number} */ event) { return lowerBound(this.rowStart, event + 1, 0, this.rowStart.length) - 1; }

  /** @param {number} event @returns {Lane} */
  laneOf(event) { return this.lanes[this.laneOfRow[this.rowOf(event)]]; }

  /** @param {number} row @param {number} time */
  firstVisible(row, time) { return lowerBound(this.latestEnd, time, this.rowStart[row], this.rowStart[row + 1]); }

  /** The event under a moment, or the nearest one within `slack`. @param {number} row @param {number} time @param {number} slack */
  at(row, time, slack) {
    const to = this.rowStart[row + 1];
    let best = -1;
    let distance = slack;
    for (let i = this.firstVisible(row, time - slack); i < to && this.start[i] <= time + slack; i++) {
      const off = Math.max(this.start[i] - time, time - this.end(i), 0);
      if (off < distance || (off === 0 && best < 0)) [best, distance] = [i, off];
      if (off === 0) break;
    }
    return best;
  }

  /** What called a host event, the nearest first. @param {number} event */
  callers(event) {
    const lane = this.laneOf(event);
    const callers = /** @type {number[]} */ ([]);
    if (lane.group !== "host") return callers;
    for (let row = this.rowOf(event) - 1; row >= lane.first_row; row--) {
      const above = this.at(row, this.start[event] + this.dur[event] / 2, 0);
      if (above >= 0) callers.push(above);
    }
    return callers;
  }

  /** Device events launched inside a host event, by itself or by anything it called. @param {number} event */
  launchedBy(event) {
    const row = this.rowOf(event);
    const launched = /** @type {number[]} */ ([]);
    if (this.lanes[this.laneOfRow[row]].group !== "host") return launched;
    const { events, times } = this.launches[this.laneOfRow[row]];
    const from = lowerBound(times, this.start[event], 0, times.length);
    for (let i = from; i < events.length && times[i] <= this.end(event); i++) {
      if (this.rowOf(this.link[events[i]]) >= row) launched.push(events[i]);
    }
    return launched;
  }

  label(/** @type {number} */ event) { return this.strings[this.name[event]]; }

  /** Shortening a name is slow next to drawing it, and the same few names come in every frame. @param {number} event */
  shortLabel(event) { return (this.shortened[this.name[event]] ??= shortName(this.label(event))); }

  /** Events whose name holds the text. @param {string} text @returns {Matches} */
  find(text) {
    const wanted = text.toLowerCase();
    const named = this.strings.map((name) => name.toLowerCase().includes(wanted));
    const mask = new Uint8Array(this.start.length);
    const events = [];
    for (let i = 0; i < this.drawn; i++) if (named[this.name[i]]) events.push(i);
    events.forEach((event) => { mask[event] = 1; });
    events.sort((a, b) => this.start[a] - this.start[b]);
    return { mask, events, busy: this.unionTime(events) };
  }

  /** Time that events, sorted by start, cover in their lanes: overlaps count once, and on a device only work counts, not what describes it. @param {number[]} events */
  unionTime(events) {
    const covered = new Float64Array(this.lanes.length).fill(-Infinity);
    const sums = { device: 0, host: 0 };
    for (const event of events) {
      const lane = this.laneOfRow[this.rowOf(event)];
      if (this.lanes[lane].group === "device" && !this.lanes[lane].work) continue;
      const end = this.end(event);
      sums[this.lanes[lane].group] += Math.max(0, end - Math.max(this.start[event], covered[lane]));
      covered[lane] = Math.max(covered[lane], end);
    }
    return sums;
  }
}
