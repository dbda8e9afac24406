// What an event is, in words: the tip next to the pointer and the panel under the timeline.

import { button, element } from "./dom.js";
import { counted, duration, shortName } from "./format.js";
import { getColors, KINDS } from "./palette.js";
import { SHARED } from "./shared.js";

/** @param {Scene} scene @param {number} event */
function eventFacts(scene, event) {
  const kind = KINDS[scene.kind[event]];
  return [
    duration(scene.dur[event]),
    `at ${duration(scene.start[event])}`,
    event >= scene.drawn ? "device idle" : SHARED.classWords[kind] || kind,
  ];
}

/** The Python function that ran on the host while the device was idle. @param {Scene} scene @param {number} event */
function idleFrame(scene, event) {
  const frame = event >= scene.drawn ? scene.frame[event - scene.drawn] : 0;
  return frame ? [`CPU was in ${shortName(scene.strings[frame - 1])}`] : [];
}

/** Lines of the tip. @param {Scene} scene @param {number} event */
export const tipLines = (scene, event) => [eventFacts(scene, event).join("  ·  "), ...idleFrame(scene, event)];

/** @param {HTMLElement} panel @param {Scene} scene @param {number} event @param {number[]} launched @param {(event: number) => void} onGo */
export function fillDetail(panel, scene, event, launched, onGo) {
  panel.classList.toggle("is-empty", event < 0);
  if (event < 0) {
    panel.textContent = "Click an event for details. Drag to pan, scroll to zoom, press ? for keys.";
    return;
  }
  const title = element("div", "tl-title");
  const swatch = element("span", "swatch");
  swatch.style.background = getColors().solid[scene.kind[event]];
  title.append(swatch, element("code", "", scene.label(event)));
  const facts = [...eventFacts(scene, event), `on ${scene.laneOf(event).name}`, ...idleFrame(scene, event)];
  panel.replaceChildren(title, element("div", "tl-facts", facts.join("  ·  ")));
  if (event < scene.drawn) panel.append(eventLinks(scene, event, launched, onGo));
}

/** Where to go from an event: what launched it, what it launched, what called it. @param {Scene} scene @param {number} event @param {number[]} launched @param {(event: number) => void} onGo */
function eventLinks(scene, event, launched, onGo) {
  const links = element("div", "tl-links");
  const add = (/** @type {string} */ text, /** @type {number} */ target) => {
    const link = button(text, () => onGo(target), "link");
    link.title = scene.label(target);
    links.append(link);
  };
  const launch = scene.link[event];
  if (launch >= 0) {
    add(`Launched by ${scene.shortLabel(launch)}, ${duration(scene.start[event] - scene.start[launch])} before`, launch);
  } else if (launched.length) {
    const sum = launched.reduce((total, kernel) => total + scene.dur[kernel], 0);
    add(`Launched ${counted(launched.length, "device event")}, ${duration(sum)}`, launched[0]);
  }
  const callers = scene.callers(launch >= 0 ? launch : event).slice(0, 5);
  callers.forEach((caller) => add(`in ${scene.shortLabel(caller)}`, caller));
  return links;
}
