// The panel's page: everything from one record, drawn again when the record changes.

import type { Live, Panel } from "../contract";
import type { PageMessage, Shown } from "../messages";
import { gpuTable, liveWords, milliseconds, ofCapacity, perSecond, size, stateWords, stepWords, type Unit, whyNoBars } from "../model/words";
import { BatchBars } from "./bars";
import { breakdown } from "./breakdown";
import { button, element, section } from "./elements";

export type Send = (message: PageMessage) => void;

export class PanelView {
  private shown: Shown | null = null;
  private bars: BatchBars | null = null;
  private inside: Record<Unit, readonly number[]> = { ms: [], bytes: [] };
  private waiting: Shown | null = null;

  constructor(private readonly root: HTMLElement, private readonly send: Send) {
    // An update that came while a bar was dragged is shown after it was let go.
    root.addEventListener("pointerup", () => queueMicrotask(() => this.showWaiting()));
    root.addEventListener("keyup", () => queueMicrotask(() => this.showWaiting()));
    root.addEventListener("focusout", () => queueMicrotask(() => this.showWaiting()));
  }

  show(shown: Shown): void {
    const sameScript = shown.uri === this.shown?.uri;
    if (sameScript && this.bars?.busy) {
      this.waiting = shown;
      return;
    }
    if (!sameScript) this.inside = { ms: [], bytes: [] };
    this.waiting = null;
    this.shown = shown;
    this.draw();
  }

  /** Only the badge: blocks keep their focus, bars their place. */
  showLive(live: Live | null): void {
    const newest = this.waiting ?? this.shown;
    if (newest === null) return;
    if (this.waiting !== null) this.waiting = { ...newest, live };
    else this.shown = { ...newest, live };
    const badge = this.root.querySelector(".live");
    if (badge !== null && live?.running) badge.replaceWith(...[this.liveBadge()].filter((part) => part !== null));
  }

  private showWaiting(): void {
    if (this.waiting !== null && !this.bars?.busy) this.show(this.waiting);
  }

  private draw(): void {
    if (this.shown === null) return;
    const { script, panel, problem } = this.shown;
    const focus = this.focusedPart();
    this.bars = null;
    const parts: (Node | null)[] = [this.liveBadge()];
    if (problem !== null) parts.push(element("p", "problem", problem));
    else if (script === null) parts.push(element("p", "hint", "Open a Python training script to see what its step costs."));
    else if (panel === null) parts.push(element("p", "hint", `Asking about ${script}…`));
    else parts.push(...this.panelParts(script, panel));
    this.root.replaceChildren(...parts.filter((part) => part !== null));
    this.root.querySelectorAll<HTMLElement>("[tabindex='0'], button")[focus]?.focus();
  }

  /** The place of the focused part among those that take focus: drawing again must not lose it. */
  private focusedPart(): number {
    const parts = [...this.root.querySelectorAll<HTMLElement>("[tabindex='0'], button")];
    return parts.indexOf(document.activeElement as HTMLElement);
  }

  private liveBadge(): Node | null {
    const live = this.shown?.live;
    if (!live?.running) return null;
    const badge = element("p", "live", element("span", "dot"), element("strong", "", "live "), liveWords(live));
    badge.setAttribute("role", "status");
    return badge;
  }

  private panelParts(script: string, panel: Panel): (Node | null)[] {
    return [
      this.verdict(script, panel),
      panel.error === null ? null : element("p", "problem", panel.error),
      panel.batch !== null && panel.batch.points.length > 1 ? this.batchBars(panel) : this.metrics(panel),
      this.blocks("Run time", "ms", panel),
      this.blocks("Memory at the peak", "bytes", panel),
      gpus(panel),
    ];
  }

  private verdict(script: string, panel: Panel): HTMLElement {
    const running = panel.runningSince !== null || this.shown?.live?.running === true;
    const buttons = element("div", "buttons", running
      ? button("Stop", () => this.send({ kind: "stop" }))
      : button(panel.state === "none" ? "Profile" : "Profile again", () => this.send({ kind: "profile" })));
    if (panel.report !== null) buttons.append(button("Report", () => this.send({ kind: "openReport" }), "secondary"));
    const words = [stepWords(panel), stateWords(panel), running ? "running" : null].filter((part) => part !== null).join(" · ");
    return element("header", panel.state, element("h1", "", script), element("p", "verdict", panel.verdict ?? ""), element("p", "state", words), buttons);
  }

  private batchBars(panel: Panel): HTMLElement | null {
    const uri = this.shown?.uri ?? null;
    if (panel.batch === null || uri === null) return null;
    this.bars = new BatchBars(panel, panel.batch, (batch) => this.send({ kind: "setBatch", uri, batch }));
    return this.bars.root;
  }

  /** Throughput and memory as they are, where there is nothing to drag. */
  private metrics(panel: Panel): HTMLElement | null {
    const rows: [string, string][] = [];
    if (panel.samplesPerSecond !== null) rows.push(["Throughput", perSecond(panel.samplesPerSecond)]);
    if (panel.peakBytes !== null) rows.push(["Peak memory", ofCapacity(size(panel.peakBytes), panel.capacityBytes)]);
    if (rows.length === 0) return null;
    const list = element("dl", "", ...rows.flatMap(([name, value]) => [element("dt", "", name), element("dd", "", value)]));
    const place = panel.batch === null ? panel.batchElsewhere : null;
    const parts: Node[] = [list, element("p", "note", whyNoBars(panel))];
    if (place !== null) parts.push(button("Show the batch size", () => this.send({ kind: "jump", uri: place.uri, line: place.line }), "secondary"));
    return section("Now", ...parts);
  }

  private blocks(title: string, unit: Unit, panel: Panel): HTMLElement | null {
    return breakdown({
      title, unit,
      blocks: unit === "ms" ? panel.time : panel.memory,
      jump: (uri, line) => this.send({ kind: "jump", uri, line }),
      inside: this.inside[unit],
      lookInside: (path) => {
        this.inside = { ...this.inside, [unit]: path };
        this.draw();
      },
    });
  }
}

function gpus(panel: Panel): HTMLElement | null {
  const rows = gpuTable(panel.gpus);
  if (rows.length === 0) return null;
  const head = element("tr", "", ...["GPU", "step", "memory", "limited by"].map((name) => element("th", "", name)));
  const body = rows.map((row) => element("tr", row.fits === "does not fit" ? "over" : "",
    element("td", "", row.gpu), element("td", "", row.step, element("span", "interval", row.interval)),
    element("td", "", row.fits), element("td", "", row.decides)));
  const table = element("table", "", element("thead", "", head), element("tbody", "", ...body));
  const now = panel.stepMs === null ? "" : ` Here it takes ${milliseconds(panel.stepMs)}.`;
  return section("The same step on other GPUs", element("p", "note", `Predicted from this run.${now}`), table);
}
