// What the server sends is checked before anything is drawn from it.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import * as contract from "../src/contract";
import { readPageMessage } from "../src/messages";
import { SCRIPT, panel, point, rawPanel } from "./panels";

test("a whole panel is read", () => {
  const read = panel();
  assert.equal(read.state, "measured");
  assert.equal(read.batch?.points.length, 5);
  assert.equal(read.time[0]?.children[0]?.line, 30);
  assert.equal(read.memory[0]?.amount, 3e8);
  assert.equal(read.gpus[0]?.fits, false);
});

test("what is missing is null, not zero", () => {
  const read = contract.readPanel({ state: "none" });
  assert.deepEqual([read.stepMs, read.peakBytes, read.batch, read.verdict, read.report], [null, null, null, null, null]);
  assert.deepEqual([read.time, read.memory, read.gpus], [[], [], []]);
});

test("wrong figures are left out and the rest stays", () => {
  const read = panel({ stepMs: "fast", peakBytes: -1, gpus: [{ gpu: "L4" }, { gpu: "T4", stepMs: 9 }] });
  assert.deepEqual([read.stepMs, read.peakBytes], [null, null]);
  assert.deepEqual(read.gpus.map(({ gpu, fits }) => [gpu, fits]), [["T4", null]]);
});

test("points come in the order of their batch, each batch once", () => {
  const read = panel({ batch: { value: 32, line: 0, points: [point(64), point(8), point(64), { batch: 16 }] } });
  assert.deepEqual(read.batch?.points.map(({ batch }) => batch), [8, 64]);
});

test("an unknown state or another kind of answer is refused with what to do", () => {
  assert.throws(() => contract.readPanel({ state: "guessed" }), /"guessed" is not known: update/);
  for (const answer of [null, undefined, 3, [], "panel"]) assert.throws(() => contract.readPanel(answer), contract.ContractError);
});

test("blocks nested without end are cut", () => {
  let block: Record<string, unknown> = { name: "leaf", ms: 1, children: [] };
  for (let i = 0; i < 5_000; i++) block = { name: `level ${i}`, ms: 1, children: [block] };
  assert.doesNotThrow(() => panel({ time: [block] }));
});

test("live and changed name their document", () => {
  assert.equal(contract.readChanged({ uri: SCRIPT }), SCRIPT);
  assert.equal(contract.readLive({ uri: SCRIPT, running: true, step: 3, stepMs: 4.5 }).samplesPerSecond, null);
  assert.throws(() => contract.readLive({ running: true }), /names no document/);
  assert.throws(() => contract.readChanged({}), /names no document/);
});

test("the commands and settings of the package are those of the contract", () => {
  const { contributes } = JSON.parse(readFileSync("package.json", "utf8"));
  const commands = contributes.commands.map(({ command }: { command: string }) => command);
  assert.deepEqual(commands, [...contract.SERVER_COMMANDS, "stepscope.restart"]);
  const settings = Object.keys(contributes.configuration.properties);
  assert.deepEqual(settings, contract.SETTINGS.map((name) => `${contract.SETTINGS_SECTION}.${name}`));
});

test("only messages that the page may send are taken from it", () => {
  assert.deepEqual(readPageMessage({ kind: "jump", uri: SCRIPT, line: 3 }), { kind: "jump", uri: SCRIPT, line: 3 });
  const refused = [
    null, "jump", {}, { kind: "shell" }, { kind: "jump", uri: "https://example.org/x.py", line: 1 }, { kind: "jump", uri: SCRIPT, line: -1 },
    { kind: "jump", uri: SCRIPT, line: 1.5 }, { kind: "setBatch", uri: SCRIPT, batch: 0 }, { kind: "setBatch", uri: SCRIPT, batch: "64" },
    { kind: "setBatch", uri: "command:workbench.action.quit", batch: 64 },
  ];
  for (const message of refused) assert.equal(readPageMessage(message), null, JSON.stringify(message));
});

test("the fake panel has every name of the contract", () => {
  assert.deepEqual(Object.keys(rawPanel()).sort(), Object.keys(panel()).sort());
});
