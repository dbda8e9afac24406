// Starts the panes, shows one rank at a time, and offers tests and scripts a small handle:
// window.stepscope.

import { startCopying } from "./copy.js";
import { partIn, partsIn } from "./dom.js";
import { toggleHelp } from "./keys.js";
import { decodeBlock, unpackProblem } from "./payload.js";
import { panes } from "./registry.js";
import { startTheme } from "./theme.js";

const help = /** @type {HTMLDialogElement} */ (document.querySelector("#help"));
const picker = /** @type {HTMLSelectElement | null} */ (document.querySelector("#rank-picker"));
const shown = { rank: -1, ready: false };

const started = panes.flatMap(({ id, start }) => {
  const section = document.getElementById(id);
  return section ? [start(section, { pickRank, findEvent })] : [];
});

function findEvent(/** @type {string} */ name) {
  started.forEach((pane) => pane.findEvent?.(name));
}

/** With many ranks, only some have tables and a timeline in the page. @param {number} number */
function pickRank(number) {
  const option = [...(picker?.options ?? [])].find(({ dataset }) => Number(dataset.number) === number);
  if (!picker || !option) return;
  picker.value = option.value;
  showRank(Number(option.value));
  document.querySelector("#timeline")?.scrollIntoView({ block: "start" });
}

async function showRank(/** @type {number} */ index) {
  shown.ready = false;
  partsIn(document, "[data-rank]").forEach((part) => { part.hidden = Number(part.dataset.rank) !== index; });
  let data = /** @type {RankData | null} */ (null);
  let problem = "";
  try {
    data = await decodeBlock(partIn(document, `#payload-${index}`).textContent ?? "");
  } catch (error) {
    problem = unpackProblem(error);
  }
  if (picker && Number(picker.value) !== index) return;
  started.forEach((pane) => pane.showRank?.(data, problem));
  if (!data) return;
  shown.rank = index;
  shown.ready = true;
}

/** The canvases keep the width they have on the screen; paper shows them smaller. */
function drawForPaper() {
  const width = partIn(document, "main").clientWidth;
  document.documentElement.style.setProperty("--print-zoom", String(Math.min(1, 700 / width)));
  started.forEach((pane) => pane.drawNow?.());
}

startTheme(partIn(document, "#theme"), () => started.forEach((pane) => pane.draw?.()), drawForPaper);
partsIn(document, "[data-help]").forEach((button) => button.addEventListener("click", () => toggleHelp(help)));
help.addEventListener("click", (event) => event.target === help && help.close());
picker?.addEventListener("change", () => showRank(Number(picker.value)));
startCopying();

const ready = [showRank(picker ? Number(picker.value) : 0), ...started.map((pane) => pane.ready)];
Object.assign(window, {
  stepscope: Object.assign({
    ready: Promise.all(ready).then(() => undefined),
    showRank,
    state: () => Object.assign(
      { ...shown, theme: document.documentElement.dataset.theme },
      ...started.map((pane) => pane.state?.()),
    ),
  }, ...started.map((pane) => pane.handle)),
});
