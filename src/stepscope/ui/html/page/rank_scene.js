// Calls of several ranks on one clock, the collectives they belong to, and the critical path.

/** Calls are numbered; a match is one collective, its members are the ranks' calls. */
export class RankScene {
  constructor(/** @type {RankLanesData} */ { columns, lanes, path, stragglers }) {
    this.lanes = lanes;
    this.path = path ?? null;
    this.span = Math.max(lanes.span, 1);
    this.stragglers = new Map(stragglers);
    this.match = columns.lane_match;
    this.place = columns.lane_place;
    this.row = columns.lane_row;
    this.kind = columns.lane_kind;
    this.size = columns.lane_size;
    this.arrival = columns.lane_arrival;
    this.start = columns.lane_start;
    this.end = columns.lane_end;
    this.complete = columns.last; // when the last rank came to each match
    this.count = this.match.length;
    /** Lanes of ranks that recorded anything. */
    this.traced = new Set([...this.place, ...lanes.steps.map(([place]) => place)]);
    const main = Math.max(0, lanes.ranks.indexOf(lanes.reference));
    /** @type {StepMark[]} */
    this.steps = lanes.steps.filter(([place]) => place === main)
      .map(([, number, start, end]) => [`step ${number}`, start, end - start]);
    /** From the top lane down. @type {number[][]} */
    this.members = this.gatherMembers();
    this.last = this.members.map((calls) => calls.reduce((last, i) => (this.arrival[i] > this.arrival[last] ? i : last), calls[0]));
    this.rows = lanes.ranks.map(() => 1);
    for (let i = 0; i < this.count; i++) this.rows[this.place[i]] = Math.max(this.rows[this.place[i]], this.row[i] + 1);
    this.pieces = path ? this.readPieces(path, columns) : [];
  }

  gatherMembers() {
    const matches = Math.max(-1, ...this.match) + 1;
    const members = Array.from({ length: matches }, () => /** @type {number[]} */ ([]));
    for (let i = 0; i < this.count; i++) members[this.match[i]].push(i);
    members.forEach((calls) => calls.sort((a, b) => this.place[a] - this.place[b]));
    return members;
  }

  /** @param {PathData} path @param {Columns} columns @returns {Piece[]} */
  readPieces({ kinds, labels }, columns) {
    return Array.from(columns.path_start, (start, k) => ({
      rank: columns.path_rank[k], start, end: columns.path_end[k],
      kind: kinds[columns.path_kind[k]], label: labels[columns.path_label[k]],
      place: this.lanes.ranks.indexOf(columns.path_rank[k]),
    }));
  }

  waits(/** @type {number} */ call) { return this.lanes.waiting[this.kind[call]]; }

  /** Until then the call waits for other ranks. @param {number} call */
  waitEnd(call) {
    return this.waits(call) ? Math.min(this.complete[this.match[call]], this.end[call]) : this.arrival[call];
  }

  /** When every rank had come and the transfer itself had begun. @param {number} call */
  transferStart(call) { return Math.min(Math.max(this.waitEnd(call), this.start[call]), this.end[call]); }

  name(/** @type {number} */ call) { return this.lanes.kinds[this.kind[call]]; }
}
