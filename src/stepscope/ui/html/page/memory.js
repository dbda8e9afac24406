// The pane about memory: a line under the pointer, and what is held there.

import { fillTip, partIn, partsIn } from "./dom.js";
import { duration, size } from "./format.js";
import { registerPane } from "./registry.js";
import { lowerBound } from "./scene.js";

/** What is held from one event to the next. @param {MemoryData} data @param {number} time */
export function heldAt(data, time) {
  const at = Math.max(0, lowerBound(data.time, Math.floor(time) + 1, 0, data.time.length) - 1);
  const lines = data.categories.filter(([, levels]) => levels[at]).reverse()
    .map(([label, levels]) => `${label} ${size(levels[at])}`);
  if (data.reserved) lines.push(`reserved ${size(data.reserved[at])}`);
  return { title: `${size(data.allocated[at])} after ${duration(data.time[at])}`, lines };
}

/** @param {HTMLElement} figure @param {SVGSVGElement} svg */
function follow(figure, svg) {
  const data = /** @type {MemoryData} */ (JSON.parse(svg.dataset.memory ?? ""));
  const tip = partIn(figure, ".tip");
  const cursor = /** @type {SVGElement} */ (svg.querySelector(".cursor"));
  const showCursor = (/** @type {boolean} */ shown) => {
    cursor.toggleAttribute("hidden", !shown);
    tip.hidden = !shown;
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const inside = x >= data.left && x <= data.right;
    showCursor(inside);
    if (!inside) return;
    cursor.setAttribute("transform", `translate(${x.toFixed(1)} 0)`);
    const { title, lines } = heldAt(data, ((x - data.left) / (data.right - data.left)) * data.last);
    fillTip(tip, [title, ...lines]);
    const beyond = event.clientX + 18 + tip.offsetWidth > innerWidth;
    tip.style.left = `${beyond ? event.clientX - 18 - tip.offsetWidth : event.clientX + 18}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
  });
  svg.addEventListener("pointerleave", () => showCursor(false));
}

registerPane("memory", (section) => {
  partsIn(section, ".mem-line").forEach((figure) => {
    const svg = figure.querySelector("svg[data-memory]");
    if (svg) follow(figure, /** @type {SVGSVGElement} */ (svg));
  });
  return {};
});
