// The strip above the timeline: the whole trace at once, with a window on what is in view.

class Overview {
  constructor(canvas, onView) {
    this.canvas = canvas;
    this.onView = onView;
    this.back = document.createElement("canvas");
    this.key = "";
    this.grab = null;
    canvas.addEventListener("pointerdown", (e) => this.down(e));
    canvas.addEventListener("pointermove", (e) => this.move(e));
    canvas.addEventListener("pointerup", () => (this.grab = null));
  }

  paint(scene, width, view) {
    const height = 46;
    const key = `${width}|${window.devicePixelRatio}|${document.documentElement.dataset.theme}`;
    if (this.scene !== scene || this.key !== key) {
      [this.scene, this.key, this.width] = [scene, key, width];
      this.paintBack(width, height);
    }
    this.view = view;
    const ctx = sizeCanvas(this.canvas, width, height);
    const colors = Palette.get();
    ctx.drawImage(this.back, 0, 0, width, height);
    const [x0, x1] = [this.x(view.t0), this.x(view.t1)];
    ctx.fillStyle = colors.dim;
    ctx.fillRect(0, 0, Math.max(x0, 0), height);
    ctx.fillRect(x1, 0, Math.max(width - x1, 0), height);
    ctx.strokeStyle = colors.accent;
    ctx.lineWidth = 1.5;
    const left = Math.max(x0, 0.75);
    ctx.strokeRect(left, 0.75, Math.max(Math.min(x1, width - 0.75) - left, 2), height - 1.5);
  }

  x(time) {
    return (time / this.scene.span) * this.width;
  }

  paintBack(width, height) {
    const ctx = sizeCanvas(this.back, width, height);
    const colors = Palette.get();
    ctx.fillStyle = colors.back;
    ctx.fillRect(0, 0, width, height);
    const bins = this.fillBins(Math.max(1, Math.floor(width)));
    bins.forEach((column, x) => {
      let y = height;
      const sum = column.reduce((a, b) => a + b, 0);
      const scale = (height - 8) / Math.max(1, sum);
      column.forEach((share, kind) => {
        if (!share) return;
        ctx.fillStyle = kind >= Palette.FIRST_CAUSE ? colors.faint[kind] : colors.solid[kind];
        ctx.fillRect(x, y - share * scale, 1, share * scale);
        y -= share * scale;
      });
    });
    ctx.fillStyle = colors.strong;
    for (const [, start] of this.scene.steps) ctx.fillRect(Math.round(this.x(start)), 0, 1, height);
  }

  // Share of each pixel's time that each class fills: device work and idle, or the host's top rows.
  fillBins(count) {
    const { scene } = this;
    const bins = Array.from({ length: count }, () => new Float32Array(Palette.KINDS.length));
    const size = scene.span / count;
    const hasDevice = scene.lanes.some((lane) => lane.work);
    const lanes = hasDevice ? scene.lanes.filter((lane) => lane.work || lane.idle) : scene.lanes;
    const rows = lanes.flatMap((lane) =>
      Array.from({ length: hasDevice ? lane.rows : 1 }, (_, depth) => lane.first_row + depth));
    for (const row of rows) {
      for (let i = scene.rowStart[row]; i < scene.rowStart[row + 1]; i++) {
        const [from, to] = [Math.max(scene.start[i], 0), Math.min(scene.end(i), scene.span)];
        const last = Math.min(count - 1, Math.floor(to / size));
        for (let bin = Math.max(0, Math.floor(from / size)); bin <= last; bin++) {
          const part = Math.min(to, (bin + 1) * size) - Math.max(from, bin * size);
          if (part > 0) bins[bin][scene.kind[i]] += part / size;
        }
      }
    }
    return bins;
  }

  down(event) {
    if (!this.scene) return;
    this.canvas.setPointerCapture(event.pointerId);
    const time = (event.offsetX / this.width) * this.scene.span;
    const inside = time >= this.view.t0 && time <= this.view.t1;
    const whole = this.view.t1 - this.view.t0 > this.scene.span * 0.98;
    this.grab = inside && !whole ? { shift: time - this.view.t0 } : { from: time };
  }

  move(event) {
    if (!this.grab) return;
    const time = (event.offsetX / this.width) * this.scene.span;
    const length = this.view.t1 - this.view.t0;
    if (this.grab.shift !== undefined) this.onView(time - this.grab.shift, time - this.grab.shift + length);
    else this.onView(Math.min(this.grab.from, time), Math.max(this.grab.from, time));
  }
}
