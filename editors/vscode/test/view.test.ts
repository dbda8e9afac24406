// The panel's page in a document: what it draws, what it sends.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Window } from "happy-dom";

import type { Live, Panel } from "../src/contract";
import { nextToShow, type PageMessage, type Shown } from "../src/messages";
import { PanelView } from "../src/page/view";
import { SCRIPT, panel } from "./panels";

interface Page {
  readonly body: HTMLElement;
  readonly sent: PageMessage[];
  readonly show: (panel: Panel | null, changes?: Partial<Shown>) => void;
  readonly showLive: (live: Live) => void;
  readonly find: (selector: string) => HTMLElement;
  readonly press: (part: HTMLElement, ...keys: string[]) => void;
}

function page(): Page {
  const window = new Window();
  Object.assign(globalThis, { document: window.document });
  const body = window.document.body as unknown as HTMLElement;
  const sent: PageMessage[] = [];
  const view = new PanelView(body, (message) => void sent.push(message));
  const find = (selector: string): HTMLElement => body.querySelector<HTMLElement>(selector) ?? assert.fail(`no ${selector}`);
  const press = (part: HTMLElement, ...keys: string[]): void => keys.forEach((key) => {
    part.dispatchEvent(new window.KeyboardEvent("keydown", { key, bubbles: true }) as unknown as Event);
    part.dispatchEvent(new window.KeyboardEvent("keyup", { key, bubbles: true }) as unknown as Event);
  });
  const show = (shown: Panel | null, changes: Partial<Shown> = {}): void =>
    view.show({ kind: "shown", script: "train.py", uri: SCRIPT, panel: shown, live: null, problem: null, ...changes });
  return { body, sent, show, showLive: (live) => view.showLive(live), find, press };
}

/** Let an update that waited be shown. */
const soon = (): Promise<void> => new Promise((resolve) => { setTimeout(resolve, 0); });

const pointer = (part: HTMLElement, type: string, clientX: number): void => {
  part.getBoundingClientRect = () => ({ left: 0, width: 200 }) as DOMRect;
  part.setPointerCapture = () => undefined;
  const window = part.ownerDocument.defaultView as unknown as Window;
  part.dispatchEvent(new window.PointerEvent(type, { clientX, button: 0, bubbles: true }) as unknown as Event);
};

test("verdict first, then the bars, the blocks and the table", () => {
  const { body, show, find } = page();
  show(panel());
  assert.equal(find(".verdict").textContent, "The host launches work too slowly.");
  assert.equal(find(".state").textContent, "42.0 ms (40.1 to 43.8 ms) a step · measured");
  assert.deepEqual([...body.querySelectorAll("h2")].map((one) => one.textContent), ["Batch size", "Run time", "Memory at the peak", "The same step on other GPUs"]);
  assert.deepEqual([...body.querySelectorAll("tbody tr td:first-child")].map((one) => one.textContent), ["A100-PCIE-40GB", "L4"]);
  assert.deepEqual([...(body.querySelector("tbody tr")?.children ?? [])].map((one) => one.textContent), ["A100-PCIE-40GB", "30.0 ms27.0 to 34.0 ms", "fits", "host"]);
});

test("names that look like HTML stay text", () => {
  const { body, show } = page();
  show(panel({ verdict: "<script>alert(1)</script>", error: "<b>bold</b>" }));
  assert.equal(body.querySelector("img, script, b"), null);
  assert.ok(body.textContent.includes("<img src=x onerror=alert(1)>"));
});

test("nothing to show is said: no script, no answer yet, a problem", () => {
  const { show, find } = page();
  show(null, { script: null, uri: null });
  assert.match(find(".hint").textContent, /Open a Python training script/);
  show(null);
  assert.match(find(".hint").textContent, /Asking about train\.py/);
  show(null, { problem: "stepscope is not installed" });
  assert.equal(find(".problem").textContent, "stepscope is not installed");
  show(panel({ state: "none", verdict: null, stepMs: null, batch: null, time: [], memory: [], gpus: [], report: null, samplesPerSecond: null, peakBytes: null }));
  assert.equal(find(".state").textContent, "not measured yet");
  assert.equal(find("button").textContent, "Profile");
});

test("dragging throughput moves both bars with intervals and writes the batch on release", () => {
  const { body, sent, show, find } = page();
  show(panel());
  const track = find(".samplesPerSecond .track");
  pointer(track, "pointerdown", 120);
  pointer(track, "pointermove", 160.5);
  assert.equal(sent.length, 0);
  assert.match(find(".note").textContent, /^32 → 48 on line 12, predicted/);
  assert.match(find(".samplesPerSecond .amount").textContent, /^828 samples\/s \(752 to 920 samples\/s\)$/);
  assert.match(find(".peakBytes .amount").textContent, /^580 MB \(522 to 638 MB\) of 800 MB$/);
  assert.equal(body.querySelectorAll("[role=slider]").length, 2);
  assert.equal(track.getAttribute("aria-valuenow"), "48");
  pointer(track, "pointerup", 150);
  assert.deepEqual(sent, [{ kind: "setBatch", uri: SCRIPT, batch: 48 }]);
});

test("dragging memory beyond the device's says that it does not fit", () => {
  const { show, find } = page();
  show(panel());
  const track = find(".peakBytes .track");
  pointer(track, "pointerdown", 100);
  assert.match(find(".peakBytes .amount").textContent, /of 800 MB: may not fit$/);
  pointer(track, "pointermove", 200);
  assert.match(find(".peakBytes .amount").textContent, /of 800 MB: does not fit$/);
  assert.ok(find(".peakBytes").classList.contains("over"));
});

test("a drag back to where it started writes nothing", () => {
  const { sent, show, find } = page();
  show(panel());
  const track = find(".samplesPerSecond .track");
  const fill = find(".samplesPerSecond .fill").style.width;
  pointer(track, "pointerdown", 200);
  pointer(track, "pointermove", 2 * Number.parseFloat(fill) - 0.01);
  pointer(track, "pointerup", 0);
  assert.deepEqual(sent, []);
});

test("keys choose, Enter writes, Escape leaves", () => {
  const { sent, show, find, press } = page();
  show(panel());
  const track = find(".peakBytes .track");
  press(track, "ArrowRight", "PageUp", "Escape");
  assert.match(find(".note").textContent, /^32 on line 12/);
  press(track, "Enter");
  assert.deepEqual(sent, []);
  press(track, "PageUp", "Enter", "Enter");
  assert.deepEqual(sent, [{ kind: "setBatch", uri: SCRIPT, batch: 64 }]);
});

test("an update waits while a bar is held and is shown after it", async () => {
  const { show, find } = page();
  show(panel());
  const track = find(".samplesPerSecond .track");
  pointer(track, "pointerdown", 150);
  show(panel({ verdict: "newer" }));
  assert.equal(find(".verdict").textContent, "The host launches work too slowly.");
  pointer(track, "pointerup", 150);
  await soon();
  assert.equal(find(".verdict").textContent, "newer");
});

test("another script is shown at once, even while a bar is held", () => {
  const { show, find } = page();
  show(panel());
  pointer(find(".samplesPerSecond .track"), "pointerdown", 150);
  show(panel({ verdict: "other" }), { uri: "file:///other.py", script: "other.py" });
  assert.equal(find(".verdict").textContent, "other");
});

test("memory that was not captured is said, and its bar does not move", () => {
  const { body, show, find } = page();
  const batch = panel().batch;
  show({ ...panel(), batch: batch && { ...batch, points: batch.points.map((one) => ({ ...one, peakBytes: null })) } });
  assert.equal(find(".peakBytes .amount").textContent, "not known");
  assert.equal(body.querySelectorAll("[role=slider]").length, 1);
});

test("memory that no batch changes is said, and its bar does not move", () => {
  const { body, show, find } = page();
  const batch = panel().batch;
  const same = { peakBytes: 9.5e6, peakLowBytes: 9.5e6, peakHighBytes: 9.5e6 };
  show({ ...panel(), batch: batch && { ...batch, points: batch.points.map((one) => ({ ...one, ...same })) } });
  assert.match(find(".peakBytes .amount").textContent ?? "", /^9\.5.* MB.*, whatever the batch$/);
  assert.doesNotMatch(find(".samplesPerSecond .amount").textContent ?? "", /whatever/);
  assert.equal(body.querySelectorAll("[role=slider]").length, 1);
});

test("a batch outside the prediction can still be dragged back into it", () => {
  const { sent, show, find, press } = page();
  const batch = panel().batch;
  show({ ...panel(), batch: batch && { ...batch, value: 4_096 } });
  assert.equal(find(".samplesPerSecond .amount").textContent, "not known");
  press(find(".samplesPerSecond .track"), "Home", "Enter");
  assert.deepEqual(sent, [{ kind: "setBatch", uri: SCRIPT, batch: 8 }]);
});

test("without a batch in the code there are figures and the reason", () => {
  const { body, show, find } = page();
  show(panel({ batch: null }));
  assert.equal(body.querySelector("[role=slider]"), null);
  assert.match(find(".note").textContent, /No batch size was found/);
  assert.equal(find("dd").textContent, "762 samples/s");
});

test("a batch in another file is named, and a button shows it", () => {
  const { body, sent, show, find } = page();
  const place = { uri: "file:///home/someone/conf/train.yaml", line: 6, name: "batch_size", value: 32 };
  show(panel({ batch: null, batchElsewhere: place }));
  assert.equal(body.querySelector("[role=slider]"), null);
  assert.match(find(".note").textContent, /cannot be dragged: batch_size 32 in line 7 of train\.yaml\./);
  const shows = [...body.querySelectorAll("button")].find((one) => one.textContent === "Show the batch size") ?? assert.fail("no button");
  shows.click();
  assert.deepEqual(sent, [{ kind: "jump", uri: place.uri, line: 6 }]);
  show(panel({ batch: null, batchElsewhere: { ...place, line: -1 } }));
  assert.match(find(".note").textContent, /No batch size was found/);
});

test("a block jumps to its line, by click and by Enter", () => {
  const { body, sent, show, press } = page();
  show(panel());
  const block = (name: string): HTMLElement => [...body.querySelectorAll<HTMLElement>(".block")].find((one) => one.textContent.startsWith(name)) ?? assert.fail(name);
  block("attention").click();
  press(block("backward"), "Enter");
  block("not in your lines").click();
  assert.deepEqual(sent, [{ kind: "jump", uri: SCRIPT, line: 30 }, { kind: "jump", uri: SCRIPT, line: 22 }]);
});

test("looking inside a block and back, by keys", () => {
  const { body, show, find, press } = page();
  show(panel());
  const names = (): string[] => [...(body.querySelector(".blocks")?.querySelectorAll(".name") ?? [])].map((one) => one.textContent);
  const forward = [...body.querySelectorAll<HTMLElement>(".block")].find((one) => one.textContent.startsWith("forward"));
  press(forward ?? assert.fail(), " ");
  assert.deepEqual(names(), ["forward", "attention", "<img src=x onerror=alert(1)>"]);
  assert.equal(find(".path").textContent, "all › forward");
  show(panel({ verdict: "newer" }));
  assert.equal(find(".path").textContent, "all › forward");
  find(".path button").click();
  assert.ok(names().includes("backward"));
});

test("arrow keys walk over the blocks", () => {
  const { body, show, press } = page();
  show(panel());
  const first = body.querySelector<HTMLElement>(".block") ?? assert.fail();
  first.focus();
  press(first, "ArrowDown");
  assert.match(body.ownerDocument.activeElement?.textContent ?? "", /^forward/);
  assert.equal(body.querySelector(".blocks")?.querySelectorAll("[tabindex='0']").length, 1);
});

test("live values move without drawing the rest again", () => {
  const { show, showLive, find } = page();
  const live = { uri: SCRIPT, running: true, step: 12, stepMs: 41.5, samplesPerSecond: null, message: null };
  show(panel(), { live });
  const block = find(".block");
  for (let step = 13; step < 500; step++) showLive({ ...live, step });
  assert.equal(find(".live").textContent, "live step 499 · 41.5 ms");
  assert.equal(find(".block"), block);
});

test("only what moved is sent to the page", () => {
  const live = { uri: SCRIPT, running: true, step: 1, stepMs: null, samplesPerSecond: null, message: null };
  const shown = { kind: "shown", script: "train.py", uri: SCRIPT, panel: panel(), live: null, problem: null } as const;
  assert.equal(nextToShow(null, shown).kind, "shown");
  assert.equal(nextToShow(shown, { ...shown, live }).kind, "shown");
  assert.deepEqual(nextToShow({ ...shown, live }, { ...shown, live: { ...live, step: 2 } }), { kind: "live", live: { ...live, step: 2 } });
  assert.equal(nextToShow({ ...shown, live }, { ...shown, live, panel: panel() }).kind, "shown");
  assert.equal(nextToShow({ ...shown, live }, shown).kind, "shown");
});

test("the live badge comes and goes, and can stop the run", () => {
  const { body, sent, show, find } = page();
  const live = { uri: SCRIPT, running: true, step: 12, stepMs: 41.5, samplesPerSecond: null, message: null };
  show(panel(), { live });
  assert.equal(find(".live").textContent, "live step 12 · 41.5 ms");
  assert.equal(find("header button").textContent, "Stop");
  find("header button").click();
  assert.deepEqual(sent, [{ kind: "stop" }]);
  show(panel());
  assert.equal(body.querySelector(".live"), null);
});
