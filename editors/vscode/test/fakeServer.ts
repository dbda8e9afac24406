// A language server that knows the contract and one script: a process of its own, spoken to over its pipes.

import { createMessageConnection, StreamMessageReader, StreamMessageWriter } from "vscode-jsonrpc/node.js";

import { CHANGED_NOTIFICATION, LIVE_NOTIFICATION, OPEN_REPORT, PANEL_REQUEST, PROFILE, SERVER_COMMANDS, SET_BATCH, STOP } from "../src/contract";
import { point, rawPanel } from "./panels";

const connection = createMessageConnection(new StreamMessageReader(process.stdin), new StreamMessageWriter(process.stdout));
let batch = 32;
let measured = false;

connection.onRequest("initialize", () => ({ capabilities: { executeCommandProvider: { commands: [...SERVER_COMMANDS] } } }));
connection.onRequest("shutdown", () => null);
connection.onNotification("exit", () => process.exit(0));
connection.onRequest(PANEL_REQUEST, () => rawPanel({
  state: measured ? "measured" : "none", batch: { value: batch, line: 11, points: [8, 32, 128].map(point) },
}));
connection.onRequest("workspace/executeCommand", async ({ command, arguments: args }: { command: string; arguments: unknown[] }) => {
  const uri = args[0] as string;
  if (command === PROFILE) {
    await connection.sendNotification(LIVE_NOTIFICATION, { uri, running: true, step: 5, stepMs: 41.2, samplesPerSecond: 776, message: null });
    measured = true;
    await connection.sendNotification(LIVE_NOTIFICATION, { uri, running: false, step: null, stepMs: null, samplesPerSecond: null, message: null });
  } else if (command === SET_BATCH) {
    const wanted = (args[1] as { batch: number }).batch;
    const newText = String(wanted);
    const range = { start: { line: 11, character: 13 }, end: { line: 11, character: 15 } };
    const { applied } = await connection.sendRequest<{ applied: boolean }>("workspace/applyEdit", { edit: { changes: { [uri]: [{ range, newText }] } } });
    if (applied) batch = wanted;
  } else if (command === OPEN_REPORT) return "/home/someone/report.html";
  else if (command !== STOP) throw new Error(`unknown command ${command}`);
  await connection.sendNotification(CHANGED_NOTIFICATION, { uri });
  return null;
});
connection.listen();
