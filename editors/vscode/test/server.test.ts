// The follower against a server in a process of its own.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { test } from "node:test";

import { createMessageConnection, StreamMessageReader, StreamMessageWriter, type MessageConnection } from "vscode-jsonrpc/node.js";

import { CHANGED_NOTIFICATION, LIVE_NOTIFICATION, PANEL_REQUEST, PROFILE, SET_BATCH } from "../src/contract";
import type { Shown } from "../src/messages";
import { PanelFollower } from "../src/panelFollower";
import { SCRIPT } from "./panels";

async function withServer(act: (connection: MessageConnection) => Promise<void>): Promise<void> {
  const child = spawn(process.execPath, ["out/test/fakeServer.mjs"], { stdio: ["pipe", "pipe", "inherit"] });
  const connection = createMessageConnection(new StreamMessageReader(child.stdout), new StreamMessageWriter(child.stdin));
  connection.listen();
  try {
    await connection.sendRequest("initialize", { capabilities: {} });
    await act(connection);
  } finally {
    connection.dispose();
    child.kill();
  }
}

test("profile, live values, a new batch through an edit of the client", { timeout: 60_000 }, () => withServer(async (connection) => {
  const shown: Shown[] = [];
  let wake = (): void => undefined;
  const until = async (seen: (last: Shown) => boolean): Promise<void> => {
    while (!shown.some(seen)) await new Promise<void>((resolve) => { wake = resolve; });
  };
  const follower = new PanelFollower({
    ask: (uri) => connection.sendRequest(PANEL_REQUEST, { uri }),
    show: (one) => { shown.push(one); wake(); },
  });
  const edits: unknown[] = [];
  connection.onNotification(CHANGED_NOTIFICATION, (params) => void follower.changed(params));
  connection.onNotification(LIVE_NOTIFICATION, (params) => follower.live(params));
  connection.onRequest("workspace/applyEdit", (params) => { edits.push(params); return { applied: true }; });
  await connection.sendNotification("textDocument/didOpen", { textDocument: { uri: SCRIPT, text: "import torch\nBATCH = 32\n" } });
  await follower.activate(SCRIPT);
  assert.deepEqual([follower.shown.panel?.state, follower.shown.panel?.batch?.line], ["none", 1]);
  await connection.sendRequest("workspace/executeCommand", { command: PROFILE, arguments: [SCRIPT] });
  await until((one) => one.live?.step === 5);
  await until((one) => one.panel?.state === "measured" && one.live === null);
  await connection.sendRequest("workspace/executeCommand", { command: SET_BATCH, arguments: [SCRIPT, { batch: 64 }] });
  const range = { start: { line: 1, character: 8 }, end: { line: 1, character: 10 } };
  assert.deepEqual(edits, [{ edit: { changes: { [SCRIPT]: [{ range, newText: "64" }] } } }]);
  const text = "import torch\nBATCH = 64\n";
  await connection.sendNotification("textDocument/didChange", { textDocument: { uri: SCRIPT }, contentChanges: [{ text }] });
  await until((one) => one.panel?.batch?.value === 64);
}));

test("a request that the server refuses becomes a problem in the panel", { timeout: 60_000 }, () => withServer(async (connection) => {
  const follower = new PanelFollower({ ask: (uri) => connection.sendRequest("stepscope/unknown", { uri }), show: () => undefined });
  await follower.activate(SCRIPT);
  assert.match(follower.shown.problem ?? "", /Unhandled method stepscope\/unknown/);
}));
