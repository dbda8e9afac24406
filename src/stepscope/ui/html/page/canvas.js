// Small things that every canvas needs.

import { getColors } from "./palette.js";

export const context = (/** @type {HTMLCanvasElement} */ canvas) => /** @type {Ctx} */ (canvas.getContext("2d"));

/** An empty canvas, sized for the screen's resolution, ready for small text. @param {HTMLCanvasElement} canvas @param {number} width @param {number} height */
export function startDrawing(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  const ctx = context(canvas);
  const colors = getColors();
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  fillBox(ctx, colors.back, 0, 0, width, height);
  ctx.font = `11px ${colors.font}`;
  ctx.textBaseline = "middle";
  return ctx;
}

/** @param {Ctx} ctx @param {string | CanvasPattern} color @param {number} x @param {number} y @param {number} width @param {number} height */
export function fillBox(ctx, color, x, y, width, height) {
  ctx.fillStyle = color;
  ctx.fillRect(x, y, width, height);
}

/** @param {Ctx} ctx @param {string} color @param {number} thick @param {number} x @param {number} y @param {number} width @param {number} height */
export function strokeBox(ctx, color, thick, x, y, width, height) {
  ctx.strokeStyle = color;
  ctx.lineWidth = thick;
  ctx.strokeRect(x, y, width, height);
}

/** @param {Ctx} ctx @param {string} color @param {string} text @param {number} x @param {number} y @param {CanvasTextAlign} align */
export function writeText(ctx, color, text, x, y, align = "left") {
  ctx.fillStyle = color;
  ctx.textAlign = align;
  ctx.fillText(text, x, y);
}

/** @param {Ctx} ctx @param {number[][]} points */
function tracePath(ctx, points) {
  ctx.beginPath();
  points.forEach(([x, y]) => ctx.lineTo(x, y));
}

/** @param {Ctx} ctx @param {string} color @param {number[][]} corners */
export function fillShape(ctx, color, corners) {
  ctx.fillStyle = color;
  tracePath(ctx, corners);
  ctx.fill();
}

/** @param {Ctx} ctx @param {string} color @param {number} thick @param {number[][]} points */
export function strokeLine(ctx, color, thick, points) {
  ctx.strokeStyle = color;
  ctx.lineWidth = thick;
  tracePath(ctx, points);
  ctx.stroke();
}

let letterWidth = 0; // a little more than the average, since names are rich in wide letters

/** As much of a label as fits, guessed from the width of an average letter. @param {Ctx} ctx @param {string} text @param {number} width */
export function fitText(ctx, text, width) {
  letterWidth ||= (ctx.measureText("abcdefghijklmnopqrstuvwxyz_:").width / 28) * 1.06;
  const room = Math.floor(width / letterWidth);
  if (text.length <= room) return text;
  return room < 5 ? "" : `${text.slice(0, room - 1)}…`;
}

const hatches = /** @type {Map<string, CanvasPattern>} */ (new Map());

/** Stripes of a colour, made once: what is striped differs without relying on hue. @param {Ctx} ctx @param {string} color */
export function hatchIn(ctx, color) {
  const known = hatches.get(color);
  if (known) return known;
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = context(tile);
  pen.strokeStyle = color;
  pen.lineWidth = 1.5;
  for (const shift of [-6, 0, 6]) {
    pen.moveTo(shift - 1, 7);
    pen.lineTo(shift + 7, -1);
  }
  pen.stroke();
  const pattern = /** @type {CanvasPattern} */ (ctx.createPattern(tile, "repeat"));
  hatches.set(color, pattern);
  return pattern;
}

/** Runs `drawNow` once at the next frame, however often it is asked. @param {() => void} drawNow */
export function oncePerFrame(drawNow) {
  let pending = 0;
  return () => {
    pending ||= requestAnimationFrame(() => {
      pending = 0;
      drawNow();
    });
  };
}
