// The scale above the lanes: the steps' names, and times from the start of the trace.

import { fillBox, fitText, startDrawing, writeText } from "./canvas.js";
import { tick } from "./format.js";
import { getColors } from "./palette.js";

const RULER_HEIGHT = 32;

/** @param {HTMLCanvasElement} canvas @param {StepMark[]} steps @param {View} view @param {number} width */
export function paintRuler(canvas, steps, { t0, t1 }, width) {
  const ctx = startDrawing(canvas, width, RULER_HEIGHT);
  const colors = getColors();
  const scale = width / (t1 - t0);
  const step = roundStep((t1 - t0) / Math.max(2, width / 110));
  ctx.fillStyle = colors.muted;
  for (let time = Math.ceil(t0 / step) * step; time < t1; time += step) {
    const x = (time - t0) * scale;
    ctx.fillRect(Math.round(x), RULER_HEIGHT - 8, 1, 8);
    ctx.fillText(tick(time, step), x + 4, RULER_HEIGHT - 8);
  }
  for (const [name, start, dur] of steps) {
    const x = Math.max((start - t0) * scale, 0);
    const end = Math.min((start + dur - t0) * scale, width);
    if (end - x < 20) continue;
    fillBox(ctx, colors.strong, x, 0, end - x - 1, 1.5);
    writeText(ctx, colors.text, fitText(ctx, name.replace("ProfilerStep#", "step "), end - x - 8), x + 4, 9);
  }
}

/** 1, 2 or 5 times a power of ten, and no finer than asked. @param {number} least */
export function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5].map((digit) => digit * power).find((step) => step >= least) ?? 10 * power;
}
