// The pane about several ranks: its data block, its pictures and its tables.

import { partIn, partsIn } from "./dom.js";
import { HeatMap } from "./heat_map.js";
import { decodeBlock } from "./payload.js";
import { RankLanes } from "./rank_lanes.js";
import { registerPane } from "./registry.js";
import { TableBox } from "./table_box.js";

registerPane("ranks", (section, page) => {
  const heat = new HeatMap(partIn(section, ".hm"), page.pickRank);
  const lanes = new RankLanes(partIn(section, ".rl"));
  const tables = new TableBox(partIn(section, ".job-tables"), () => {});

  async function load() {
    /** @type {JobData} */
    let job;
    try {
      job = await decodeBlock(partIn(document, "#payload-job").textContent ?? "");
    } catch {
      partsIn(section, ".hm, .rl, .job-tables").forEach((part) => { part.hidden = true; });
      return;
    }
    if (job.steps.length) heat.load(job);
    if (job.lanes) lanes.load(/** @type {RankLanesData} */ (job));
    tables.load(job.tables);
  }

  return {
    ready: load(),
    draw: () => [heat, lanes].forEach((chart) => chart.draw()),
    drawNow: () => [heat, lanes].forEach((chart) => chart.drawNow()),
    state: () => ({
      metric: heat.metric || null,
      order: heat.order.map((place) => (place < 0 ? heat.data.hosts[-1 - place] : heat.data.ranks[place])).slice(0, 50),
      lanesView: lanes.scene ? [lanes.view.t0, lanes.view.t1] : null,
      lanesSpan: lanes.span,
      jobTable: tables.table?.id ?? null,
    }),
    handle: { rankLanes: lanes },
  };
});
