// The pane about the whole run: its data block, its charts, and what its buttons do.

import { partIn, partsIn } from "./dom.js";
import { decodeBlock, unpackProblem } from "./payload.js";
import { registerPane } from "./registry.js";
import { context } from "./canvas.js";
import { RunChart } from "./run_chart.js";
import { RunHistogram } from "./run_histogram.js";
import { RunScene } from "./run_series.js";
import { shapeIcon } from "./run_shapes.js";
import { SHARED } from "./shared.js";
import { StallFlames } from "./stall_flames.js";

registerPane("run", (section) => {
  const chart = new RunChart(partIn(section, ".run-chart"));
  const histogram = new RunHistogram(partIn(section, ".run-spread"));
  const flames = section.querySelector(".run-why") ? new StallFlames(section) : null;
  const chooser = /** @type {HTMLSelectElement | null} */ (section.querySelector(".run-rank"));
  const charts = [chart, histogram, ...(flames ? [flames.graph] : [])];
  partsIn(section, "[data-shape]").forEach((part) => part.prepend(shapeIcon(part.dataset.shape ?? "")));

  function choose(/** @type {number} */ place) {
    chart.choose(place);
    histogram.load(chart.drawn.data, chart.shown);
    if (chooser) chooser.value = String(place);
  }

  /** To the longest stall of a row. @param {HTMLElement} button */
  function jump({ dataset }) {
    const series = chart.drawn.series[Number(dataset.series)];
    if (!chart.shown.includes(series)) choose(series.place);
    chart.root.scrollIntoView({ block: "nearest" });
    chart.goTo(chart.eventOf(series, series.placeOf(Number(dataset.step))));
  }

  function toggle(/** @type {HTMLElement} */ button) {
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(shown));
    chart.showCause(SHARED.stalls.indexOf(button.dataset.shape ?? ""), shown);
  }

  async function load() {
    try {
      chart.load(new RunScene(await decodeBlock(partIn(section, "#payload-run").textContent ?? "")));
    } catch (error) {
      partsIn(section, ".run-chart, .run-spread").forEach((part) => { part.hidden = true; });
      partIn(section, ".run-problem").textContent = unpackProblem(error);
      return;
    }
    partsIn(section, "[data-axis]").forEach((button) => { button.hidden = !chart.drawn.data.zero_ms; });
    choose(-1);
    partsIn(section, "[data-step]").forEach((button) => button.addEventListener("click", () => jump(button)));
    partsIn(section, "button[data-shape]").forEach((button) => button.addEventListener("click", () => toggle(button)));
    chooser?.addEventListener("change", () => choose(Number(chooser.value)));
  }

  return {
    ready: Promise.all([load(), flames?.load()]).then(() => {}),
    draw: () => charts.forEach((one) => one.draw()),
    drawNow: () => charts.forEach((one) => one.drawNow()),
    state: () => ({
      runView: chart.scene ? [chart.view.t0, chart.view.t1] : null,
      runSpan: chart.span,
      runShown: chart.shown.map(({ name }) => name),
      runScale: chart.scaleName,
      runSelected: chart.selected >= 0 ? chart.tipText(chart.selected) : null,
      runFrameMs: chart.frameMs,
      runCause: flames?.chosen ?? null,
      runStacks: flames?.trees[flames.chosen]?.size ?? 0,
    }),
    handle: {
      runChart: chart,
      stallFlames: flames,
      /** Draws at once and reads a pixel back, so that the time includes the drawing itself. */
      redrawRun() {
        const began = performance.now();
        chart.drawNow();
        context(chart.canvas).getImageData(0, 0, 1, 1);
        return performance.now() - began;
      },
    },
  };
});
