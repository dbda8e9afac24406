// The events of one rank, arranged for binary search. Idle gaps are a row like any other.

class Scene {
  constructor(data) {
    const { picture, columns } = data;
    this.span = Math.max(picture.span_ns, 1);
    this.steps = picture.steps;
    this.strings = [...picture.strings];
    this.leftOut = picture.left_out;
    this.lanes = picture.lanes.map((lane) => ({ ...lane, folded: false }));
    this.fillEvents(columns);
    this.addGapLane(columns);
    this.rows = this.rowStart.length - 1;
    this.laneOfRow = new Uint32Array(this.rows);
    this.lanes.forEach((lane, i) => this.laneOfRow.fill(i, lane.first_row, lane.first_row + lane.rows));
    this.indexRows();
    this.indexLaunches();
  }

  fillEvents(columns) {
    const gaps = columns.gap_start.length;
    const size = columns.dur.length;
    const total = size + gaps;
    this.rowStart = [...columns.row_start];
    this.start = new Float64Array(total);
    this.dur = new Float64Array(total);
    this.name = new Uint32Array(total);
    this.kind = new Uint8Array(total);
    this.link = new Int32Array(total).fill(-1);
    this.frame = columns.gap_frame;
    this.drawn = size;
    this.dur.set(columns.dur);
    this.name.set(columns.name);
    this.kind.set(columns.kind);
    for (let row = 0; row + 1 < this.rowStart.length; row++) {
      let time = 0;
      for (let i = this.rowStart[row]; i < this.rowStart[row + 1]; i++) {
        time += Payload.unzigzag(columns.start_delta[i]);
        this.start[i] = time;
      }
    }
    let link = -1;
    for (let i = 0; i < size; i++) {
      link += Payload.unzigzag(columns.link[i]);
      this.link[i] = link;
    }
  }

  addGapLane(columns) {
    const gaps = columns.gap_start.length;
    if (!gaps) return;
    const size = this.drawn;
    this.start.set(columns.gap_start, size);
    this.dur.set(columns.gap_dur, size);
    const first = this.strings.length;
    WORDS.causes.forEach((cause) => this.strings.push(WORDS.causeLabels[cause] || cause));
    for (let i = 0; i < gaps; i++) {
      this.name[size + i] = first + columns.gap_cause[i];
      this.kind[size + i] = Palette.FIRST_CAUSE + columns.gap_cause[i];
    }
    this.lanes.unshift({
      name: "Idle, by cause", group: "device", work: false, idle: true, folded: false,
      first_row: this.rowStart.length - 1, rows: 1, events: gaps,
    });
    this.rowStart.push(size + gaps);
  }

  indexRows() {
    const total = this.start.length;
    this.reach = new Float64Array(total); // latest end so far in the row: sorted even if events overlap
    this.busy = new Float64Array(total + 1); // running sum of durations
    for (let row = 0; row < this.rows; row++) {
      let reach = -Infinity;
      for (let i = this.rowStart[row]; i < this.rowStart[row + 1]; i++) {
        reach = Math.max(reach, this.start[i] + this.dur[i]);
        this.reach[i] = reach;
      }
    }
    for (let i = 0; i < total; i++) this.busy[i + 1] = this.busy[i] + this.dur[i];
  }

  // Device events of each lane by the time of their launch: what an operator launched is a range.
  indexLaunches() {
    const perLane = this.lanes.map(() => []);
    for (let i = 0; i < this.drawn; i++) {
      if (this.link[i] >= 0) perLane[this.laneOfRow[this.rowOf(this.link[i])]].push(i);
    }
    this.launches = perLane.map((events) => {
      events.sort((a, b) => this.start[this.link[a]] - this.start[this.link[b]]);
      return { events, times: Float64Array.from(events, (e) => this.start[this.link[e]]) };
    });
  }

  static lowerBound(array, value, lo, hi) {
    while (lo < hi) {
      const mid = (lo + hi) >>> 1;
      if (array[mid] < value) lo = mid + 1;
      else hi = mid;
    }
    return lo;
  }

  end(event) {
    return this.start[event] + this.dur[event];
  }

  rowOf(event) {
    return Scene.lowerBound(this.rowStart, event + 1, 0, this.rowStart.length) - 1;
  }

  laneOf(event) {
    return this.lanes[this.laneOfRow[this.rowOf(event)]];
  }

  firstVisible(row, time) {
    return Scene.lowerBound(this.reach, time, this.rowStart[row], this.rowStart[row + 1]);
  }

  // The event under a moment, or the nearest one within `slack`.
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

  ancestors(event) {
    const lane = this.laneOf(event);
    const out = [];
    if (lane.group !== "host") return out;
    for (let row = this.rowOf(event) - 1; row >= lane.first_row; row--) {
      const above = this.at(row, this.start[event] + this.dur[event] / 2, 0);
      if (above >= 0) out.push(above);
    }
    return out;
  }

  // Device events launched inside a host event, itself or anything it called.
  launchedBy(event) {
    const row = this.rowOf(event);
    if (this.lanes[this.laneOfRow[row]].group !== "host") return [];
    const { events, times } = this.launches[this.laneOfRow[row]];
    const from = Scene.lowerBound(times, this.start[event], 0, times.length);
    const out = [];
    for (let i = from; i < events.length && times[i] <= this.end(event); i++) {
      if (this.rowOf(this.link[events[i]]) >= row) out.push(events[i]);
    }
    return out;
  }

  label(event) {
    return this.strings[this.name[event]];
  }

  // Shortening a name is slow next to drawing it, and the same few names come in every frame.
  shortLabel(event) {
    const name = this.name[event];
    this.shortened = this.shortened || new Map();
    if (!this.shortened.has(name)) this.shortened.set(name, Format.short(this.strings[name]));
    return this.shortened.get(name);
  }

  // Events whose name holds the text, in order of time; busy is the union per lane.
  find(text) {
    const wanted = text.toLowerCase();
    const named = this.strings.map((name) => name.toLowerCase().includes(wanted));
    const mask = new Uint8Array(this.start.length);
    const events = [];
    for (let i = 0; i < this.drawn; i++) {
      if (named[this.name[i]]) {
        mask[i] = 1;
        events.push(i);
      }
    }
    return { mask, events: events.sort((a, b) => this.start[a] - this.start[b]), busy: this.unionTime(events) };
  }

  unionTime(events) {
    const reach = new Float64Array(this.lanes.length).fill(-Infinity);
    const order = [...events].sort((a, b) => this.start[a] - this.start[b]);
    const sums = { device: 0, host: 0 };
    for (const event of order) {
      const lane = this.laneOfRow[this.rowOf(event)];
      const end = this.end(event);
      sums[this.lanes[lane].group] += Math.max(0, end - Math.max(this.start[event], reach[lane]));
      reach[lane] = Math.max(reach[lane], end);
    }
    return sums;
  }
}
