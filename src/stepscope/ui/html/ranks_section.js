// The section about several ranks: its data block, its pictures and its tables.

class Together {
  constructor(root, onPick) {
    this.root = root;
    this.heat = new HeatMap(root.querySelector(".hm"), onPick);
    this.lanes = new RankLanes(root.querySelector(".rl"));
    this.tables = new Tables(root.querySelector(".job-tables"), () => {});
  }

  async load() {
    let job = null;
    try {
      job = await Payload.load(document.querySelector("#payload-job"));
    } catch (error) {
      this.root.querySelectorAll(".hm, .rl, .job-tables").forEach((part) => (part.hidden = true));
      return;
    }
    if (job.steps.length) this.heat.load(job);
    if (job.lanes) this.lanes.load(job);
    this.tables.load(job.tables);
  }

  draw() {
    this.heat.draw();
    this.lanes.draw();
  }

  drawNow() {
    this.heat.drawNow();
    this.lanes.drawNow();
  }

  state() {
    return {
      metric: this.heat.metric || null,
      order: this.heat.order ? this.heat.order.map((i) => this.heat.job.ranks[i]).slice(0, 50) : [],
      lanesView: this.lanes.view ? [this.lanes.view.t0, this.lanes.view.t1] : null,
      lanesSpan: this.lanes.scene ? this.lanes.scene.span : 0,
      jobTable: this.tables.table ? this.tables.table.id : null,
    };
  }
}
