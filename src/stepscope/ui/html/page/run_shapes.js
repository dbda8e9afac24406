// A shape for each cause of a stall, so that colour is never the only difference: the same path is
// drawn on the canvas and in legends.

import { context } from "./canvas.js";
import { SHARED } from "./shared.js";

/** Around 0, 0. @type {Record<string, string>} */
const SHAPES = {
  data: "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0Z", // circle
  evaluation: "M-3.7-3.7H3.7V3.7H-3.7Z", // square
  collecting: "M-3.7-3.7H3.7V3.7H-3.7Z", // square
  generating: "M-3.7-3.7H3.7V3.7H-3.7Z", // square
  without_gradients: "M-3.7-3.7H3.7V3.7H-3.7Z", // square
  checkpoint: "M0-5.2L5.2 0L0 5.2L-5.2 0Z", // diamond
  gc: "M0-4.8L5 4H-5Z", // triangle
  compile: "M0 4.8L5-4H-5Z", // triangle, upside down
  allocator: "M-1.5-4.7H1.5V-1.5H4.7V1.5H1.5V4.7H-1.5V1.5H-4.7V-1.5H-1.5Z", // plus
  collective: "M-4.4-4.6H4.4L-4.4 4.6H4.4Z", // hourglass
  operating_system: "M-4.6-2.6L-2.6-4.6L0-2L2.6-4.6L4.6-2.6L2 0L4.6 2.6L2.6 4.6L0 2L-2.6 4.6L-4.6 2.6L-2 0Z", // cross
  logging: "M-5.2-2H5.2V2H-5.2Z", // bar
  unknown: "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0ZM-2 0a2 2 0 1 1 4 0a2 2 0 1 1-4 0Z", // ring
};

/** For a legend. @param {string} cause */
export function shapeIcon(cause) {
  const space = "http://www.w3.org/2000/svg";
  const icon = document.createElementNS(space, "svg");
  icon.setAttribute("viewBox", "-6 -6 12 12");
  icon.setAttribute("aria-hidden", "true");
  icon.setAttribute("class", "run-shape");
  icon.style.setProperty("fill", `var(--c-stall_${cause})`);
  const path = document.createElementNS(space, "path");
  path.setAttribute("d", SHAPES[cause] ?? SHAPES.unknown);
  icon.append(path);
  return icon;
}

const ROOM = 14; // pixels
let made = { back: "", ratio: 0, sprites: /** @type {HTMLCanvasElement[]} */ ([]) };

/** The shapes as small pictures, made once: a frame has a thousand of them. @param {Colors} colors */
function spritesOf(colors) {
  const ratio = window.devicePixelRatio || 1;
  if (made.back !== colors.back || made.ratio !== ratio) {
    made = { back: colors.back, ratio, sprites: SHARED.stalls.map((cause, i) => drawSprite(cause, colors.stalls[i].solid, colors.back, ratio)) };
  }
  return made.sprites;
}

/** @param {string} cause @param {string} color @param {string} rim @param {number} ratio */
function drawSprite(cause, color, rim, ratio) {
  const sprite = document.createElement("canvas");
  sprite.width = sprite.height = Math.round(ROOM * ratio);
  const ctx = context(sprite);
  ctx.scale(ratio, ratio);
  ctx.translate(ROOM / 2, ROOM / 2);
  const path = new Path2D(SHAPES[cause] ?? SHAPES.unknown);
  Object.assign(ctx, { fillStyle: color, strokeStyle: rim, lineWidth: 1.5 });
  ctx.stroke(path);
  ctx.fill(path);
  return sprite;
}

/** @param {Ctx} ctx @param {Colors} colors @param {number} cause @param {number} x @param {number} y */
export function drawShape(ctx, colors, cause, x, y) {
  ctx.drawImage(spritesOf(colors)[cause], Math.round(x - ROOM / 2), Math.round(y - ROOM / 2), ROOM, ROOM);
}
