// A language server that knows the contract and one script: a process of its own, spoken to over its pipes.

import { createMessageConnection, StreamMessageReader, StreamMessageWriter } from "vscode-jsonrpc/node.js";

import { CHANGED_NOTIFICATION, LIVE_NOTIFICATION, OPEN_REPORT, PANEL_REQUEST, PROFILE, SERVER_COMMANDS, SET_BATCH, STOP } from "../src/contract";
import { point, rawPanel } from "./panels";

const connection = createMessageConnection(new StreamMessageReader(process.stdin), new StreamMessageWriter(process.stdout));
let measured = false;
/** The script as the editor has it. */
let lines: string[] = [];

/** The number after "BATCH =": its line, columns and value. */
function batchPlace(): { line: number; start: number; end: number; value: number } | null {
  for (const [line, text] of lines.entries()) {
    const found = /BATCH = (\d+)/.exec(text);
    if (found?.[1] !== undefined) return { line, start: found.index + 8, end: found.index + found[0].length, value: Number(found[1]) };
  }
  return null;
}

function remember(text: string): void {
  lines = text.split("\n");
}

connection.onRequest("initialize", () => ({ capabilities: { textDocumentSync: 1, executeCommandProvider: { commands: [...SERVER_COMMANDS] } } }));
connection.onRequest("shutdown", () => null);
connection.onNotification("exit", () => process.exit(0));
connection.onNotification("textDocument/didOpen", ({ textDocument }: { textDocument: { text: string } }) => remember(textDocument.text));
connection.onNotification("textDocument/didChange", async ({ textDocument, contentChanges }: { textDocument: { uri: string }; contentChanges: { text: string }[] }) => {
  remember(contentChanges.at(-1)?.text ?? "");
  await connection.sendNotification(CHANGED_NOTIFICATION, { uri: textDocument.uri });
});
connection.onRequest(PANEL_REQUEST, () => {
  const place = batchPlace();
  const batch = place && { value: place.value, line: place.line, points: [8, 16, 32, 64, 128].map(point) };
  return rawPanel({ state: measured ? "measured" : "none", batch });
});
connection.onRequest("workspace/executeCommand", async ({ command, arguments: args }: { command: string; arguments: unknown[] }) => {
  const uri = args[0] as string;
  if (command === PROFILE) {
    await connection.sendNotification(LIVE_NOTIFICATION, { uri, running: true, step: 5, stepMs: 41.2, samplesPerSecond: 776, message: null });
    measured = true;
    await connection.sendNotification(LIVE_NOTIFICATION, { uri, running: false, step: null, stepMs: null, samplesPerSecond: null, message: null });
  } else if (command === SET_BATCH) {
    const wanted = (args[1] as { batch: number }).batch;
    const place = batchPlace();
    if (place === null) throw new Error("no batch size was found in the code");
    const range = { start: { line: place.line, character: place.start }, end: { line: place.line, character: place.end } };
    await connection.sendRequest("workspace/applyEdit", { edit: { changes: { [uri]: [{ range, newText: String(wanted) }] } } });
  } else if (command === OPEN_REPORT) return "/home/someone/report.html";
  else if (command !== STOP) throw new Error(`unknown command ${command}`);
  await connection.sendNotification(CHANGED_NOTIFICATION, { uri });
  return null;
});
connection.onClose(() => process.exit(0));
connection.listen();
