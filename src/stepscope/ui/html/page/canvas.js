// Small things that every canvas needs.

/** @param {HTMLCanvasElement} canvas */
export const context = (canvas) => /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));

/** Sized for the screen's resolution. @param {HTMLCanvasElement} canvas @param {number} width @param {number} height */
export function sizeCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const ctx = context(canvas);
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  return ctx;
}

let knownLetterWidth = 0;

/** A little more than the average, since names are rich in wide letters. @param {CanvasRenderingContext2D} ctx */
export function letterWidth(ctx) {
  knownLetterWidth ||= (ctx.measureText("abcdefghijklmnopqrstuvwxyz_:").width / 28) * 1.06;
  return knownLetterWidth;
}

/** As much of a label as fits, guessed from the width of an average letter. @param {string} text @param {number} width @param {number} letter */
export function fitText(text, width, letter) {
  const room = Math.floor(width / letter);
  if (text.length <= room) return text;
  return room < 5 ? "" : `${text.slice(0, room - 1)}…`;
}

/** @type {Map<string, CanvasPattern>} */
const hatches = new Map();

/** Stripes of a colour, made once: what is striped differs without relying on hue. @param {CanvasRenderingContext2D} ctx @param {string} color */
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
    if (pending) return;
    pending = requestAnimationFrame(() => {
      pending = 0;
      drawNow();
    });
  };
}
