// Where the lanes lie: device lanes stay in sight at the top while the threads scroll under them.

import { element } from "./dom.js";
import { counted } from "./format.js";

export const ROW = 17;
export const LANE_PAD = 5;

/** Threads that hardly did anything, and rows that only annotate, start folded. @param {Scene} scene */
export function foldMinorLanes(scene) {
  const threads = scene.lanes.filter((lane) => lane.group === "host");
  const notes = scene.lanes.filter((lane) => lane.group === "device" && !lane.work && !lane.idle);
  const busiest = Math.max(1, ...threads.map((lane) => lane.events));
  threads.forEach((lane, i) => { lane.folded = i > 0 && lane.events < busiest * 0.02; });
  notes.forEach((lane) => { lane.folded = true; });
}

/** @param {Scene} scene @param {number} room @param {() => number} scrollTop @returns {Layout} */
export function placeLanes(scene, room, scrollTop) {
  let total = 0;
  const lanes = scene.lanes.map((lane) => {
    const height = (lane.folded ? 1 : lane.rows) * ROW + 2 * LANE_PAD;
    const place = { lane, y: total, height, pinned: false };
    total += height;
    return place;
  });
  const height = Math.min(room, total);
  const device = lanes.filter((place) => place.lane.group === "device");
  const deviceHeight = device.reduce((sum, place) => sum + place.height, 0);
  const pinned = device.length < lanes.length && deviceHeight <= height * 0.5 ? deviceHeight : 0;
  device.forEach((place) => { place.pinned = pinned > 0; });
  return {
    lanes, pinned, total, height,
    width: 0,
    gapRow: scene.lanes.find((lane) => lane.idle)?.first_row ?? -1,
    top: (place) => (place.pinned ? place.y : place.y - scrollTop()),
    placeOf: (event) => lanes[scene.laneOfRow[scene.rowOf(event)]],
  };
}

/** @param {HTMLElement} gutter @param {Layout} layout @param {(lane: Lane) => void} onToggle */
export function fillGutter(gutter, layout, onToggle) {
  const pinned = element("div", "tl-pinned");
  pinned.style.height = `${layout.pinned}px`;
  gutter.replaceChildren(pinned);
  for (const place of layout.lanes) (place.pinned ? pinned : gutter).append(laneLabel(place, onToggle));
}

/** @param {PlacedLane} place @param {(lane: Lane) => void} onToggle */
function laneLabel({ lane, y, height }, onToggle) {
  const foldable = lane.rows > 1;
  const label = element(foldable ? "button" : "div", "tl-label");
  label.style.top = `${y}px`;
  label.style.height = `${height}px`;
  label.title = `${lane.name}: ${counted(lane.events, lane.idle ? "gap" : "event")}`;
  const fold = element("span", "tl-fold", foldable ? (lane.folded ? "▸" : "▾") : "");
  fold.setAttribute("aria-hidden", "true");
  label.append(fold, element("span", "tl-name", lane.name));
  if (foldable) {
    label.setAttribute("type", "button");
    label.setAttribute("aria-expanded", String(!lane.folded));
    label.addEventListener("click", () => onToggle(lane));
  }
  return label;
}
