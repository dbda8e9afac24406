// What the panel says.

import assert from "node:assert/strict";
import { test } from "node:test";

import { readLive, type Block } from "../src/contract";
import { findPython, whyEnded } from "../src/interpreter";
import { blockTip, fileName, gpuTable, liveWords, milliseconds, ofCapacity, perSecond, size, statusWords, stepWords, withInterval } from "../src/model/words";
import { pageHtml, reportHtml } from "../src/pageHtml";
import { SCRIPT, panel } from "./panels";

test("an interval names its unit once", () => {
  assert.equal(withInterval({ value: 31.9, low: 30.1, high: 33.8 }, milliseconds), "31.9 ms (30.1 to 33.8 ms)");
  assert.equal(withInterval({ value: 1e9, low: 9e8, high: 1.1e9 }, size), "1.00 GB (900 MB to 1.10 GB)");
  assert.equal(withInterval({ value: 762, low: 700, high: 800 }, perSecond), "762 samples/s (700 to 800 samples/s)");
  assert.equal(withInterval({ value: 5, low: 5, high: 5 }, milliseconds), "5.00 ms");
});

test("the step is told with its interval, or not at all", () => {
  assert.equal(stepWords(panel()), "42.0 ms (40.1 to 43.8 ms) a step");
  assert.equal(stepWords(panel({ lowMs: null, highMs: null })), "42.0 ms a step");
  assert.equal(stepWords(panel({ stepMs: null })), null);
});

test("a share that is not known is left out", () => {
  const [forward] = panel().time;
  assert.ok(forward);
  assert.equal(blockTip({ block: forward, gathered: [] }, "ms"), "forward\n14.0 ms · 33%\nline 21\ndouble click: look inside");
  assert.equal(blockTip({ block: { ...forward, share: null, line: null, children: [] }, gathered: [] }, "ms"), "forward\n14.0 ms");
  assert.equal(ofCapacity("1.00 GB", null), "1.00 GB");
  assert.equal(ofCapacity("1.00 GB", 8e10), "1.00 GB of 80.0 GB");
});

test("gathered blocks are named, a few of them", () => {
  const small = Array.from({ length: 20 }, (_, i) => ({ name: `op ${i}`, amount: 1e6, share: null, uri: null, line: null, children: [] }));
  const tip = blockTip({ block: { ...small[0], name: "20 smaller", amount: 2e7 } as Block, gathered: small }, "bytes").split("\n");
  assert.deepEqual([tip[0], tip[1], tip[2], tip.at(-1)], ["20 smaller", "20.0 MB", "op 0: 1.00 MB", "and 8 more"]);
});

test("GPUs: fastest first, what does not fit last, the unknown said", () => {
  const rows = panel({ gpus: [{ gpu: "slow", stepMs: 9, fits: true }, { gpu: "small", stepMs: 1, fits: false }, { gpu: "fast", stepMs: 2 }] }).gpus;
  assert.deepEqual(gpuTable(rows).map(({ gpu, fits, interval }) => [gpu, fits, interval]), [
    ["fast", "not known", ""], ["slow", "fits", ""], ["small", "does not fit", ""],
  ]);
});

test("the badge and the status bar", () => {
  const live = readLive({ uri: SCRIPT, running: true, step: 1234, stepMs: 31.9, message: "epoch 1 $(bug)" });
  assert.equal(liveWords(live), "step 1,234 · 31.9 ms · epoch 1 $(bug)");
  assert.equal(liveWords(readLive({ uri: SCRIPT, running: true })), "starting");
  assert.equal(statusWords({ panel: panel(), live, problem: null }), "$(pulse) step 1,234 · 31.9 ms · epoch 1 $ (bug)");
  assert.equal(statusWords({ panel: panel(), live: { ...live, running: false }, problem: null }), "$(watch) 42.0 ms a step");
  assert.equal(statusWords({ panel: panel({ state: "stale" }), live: null, problem: null }), "$(watch) ≈ 42.0 ms a step");
  assert.equal(statusWords({ panel: panel(), live, problem: "ended" }), "$(warning) stepscope");
  assert.equal(statusWords({ panel: panel({ stepMs: null }), live: null, problem: null }), null);
});

test("the Python: the setting, the Python extension, the folder's environment, the system's", () => {
  const facts = { setting: "", chosen: null, folder: "/w", platform: "linux" as const, exists: (path: string) => path === "/w/.venv/bin/python" };
  assert.equal(findPython({ ...facts, setting: " ${workspaceFolder}/py ", chosen: "/other" }), "/w/py");
  assert.equal(findPython({ ...facts, chosen: "/other" }), "/other");
  assert.equal(findPython(facts), "/w/.venv/bin/python");
  assert.equal(findPython({ ...facts, folder: null }), "python3");
  assert.equal(findPython({ ...facts, exists: () => false, platform: "win32" }), "python");
});

test("a server that is not there is explained with what to do", () => {
  assert.match(whyEnded("/no/python", "ENOENT", ""), /\/no\/python was not found: .* stepscope\.python/);
  assert.match(whyEnded("/bin/cat", "ETIMEDOUT", ""), /\/bin\/cat did not answer .* stepscope\.python/);
  assert.match(whyEnded("py", null, "py: No module named stepscope\n"), /not installed for py: run "py -m pip install/);
  assert.match(whyEnded("py", null, "Traceback\nModuleNotFoundError: No module named 'pygls'"), /needs pygls: run/);
  assert.match(whyEnded("py", null, "one\nUsageError: two\n"), /ended: UsageError: two\. Its log/);
  assert.match(whyEnded("py", null, ""), /ended\. Its log/);
});

test("pages load nothing from outside", () => {
  const html = pageHtml({ script: "vscode-resource:/page.js", style: "vscode-resource:/page.css", source: "vscode-resource:", nonce: "abc" });
  assert.match(html, /content="default-src 'none'; style-src vscode-resource:; script-src 'nonce-abc'"/);
  assert.equal(html.match(/https?:/), null);
  const report = reportHtml("<!doctype html><html><head lang='en'><title>x</title></head><body></body></html>");
  assert.match(report, /^<!doctype html><html><head lang='en'><meta http-equiv="Content-Security-Policy" content="default-src 'none'/);
  assert.match(reportHtml("no head"), /^<meta http-equiv=.*no head$/);
});

test("file names are readable, whatever the address holds", () => {
  assert.equal(fileName("file:///a/my%20train.py"), "my train.py");
  assert.equal(fileName("file:///a/100%.py"), "100%.py");
});
