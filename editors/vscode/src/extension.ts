// Joins the parts: the language server, the panel, the status bar and the commands.

import { existsSync } from "node:fs";
import { readFile } from "node:fs/promises";

import * as vscode from "vscode";

import { StepscopeServer } from "./client";
import { OPEN_REPORT, PROFILE, PROFILE_ON_SAVE, SET_BATCH, SETTINGS_SECTION, STOP } from "./contract";
import { findPython } from "./interpreter";
import type { PageMessage, Shown } from "./messages";
import { fileName, statusWords } from "./model/words";
import { reportHtml } from "./pageHtml";
import { PanelFollower } from "./panelFollower";
import { PanelViewProvider } from "./panelView";
import { pythonChoice, type PythonChoice } from "./pythonChoice";

let running: Extension | null = null;

export async function activate(context: vscode.ExtensionContext): Promise<void> {
  running = new Extension(context);
  await running.start();
}

export async function deactivate(): Promise<void> {
  await running?.stop();
  running = null;
}

class Extension {
  private readonly output = vscode.window.createOutputChannel("stepscope");
  private readonly status = vscode.window.createStatusBarItem("stepscope.step", vscode.StatusBarAlignment.Right, 90);
  private readonly follower: PanelFollower;
  private readonly panel: PanelViewProvider;
  private readonly profiledOnSave = new Map<string, boolean>();
  private server: StepscopeServer | null = null;
  private choice: PythonChoice | null = null;

  constructor(private readonly context: vscode.ExtensionContext) {
    this.panel = new PanelViewProvider(context.extensionUri, (message) => void this.say(() => this.receive(message)));
    this.follower = new PanelFollower({ ask: (uri) => this.ready().panel(uri), show: (shown) => this.show(shown) });
    this.status.command = "stepscope.panel.focus";
    context.subscriptions.push(
      this.output, this.status,
      vscode.window.registerWebviewViewProvider("stepscope.panel", this.panel),
      vscode.window.onDidChangeActiveTextEditor((editor) => this.follow(editor)),
      vscode.workspace.onDidChangeConfiguration((event) => {
        if (event.affectsConfiguration(`${SETTINGS_SECTION}.python`)) void this.restart();
      }),
      ...this.commands(),
    );
  }

  async start(): Promise<void> {
    this.choice = await pythonChoice(() => void this.restartForNewPython());
    if (this.choice !== null) this.context.subscriptions.push(this.choice);
    this.show(this.follower.shown);
    void this.restart();
    this.follow(vscode.window.activeTextEditor);
  }

  async stop(): Promise<void> {
    await this.server?.stop();
    this.server = null;
  }

  private async restart(): Promise<void> {
    const before = this.server;
    const server = new StepscopeServer(this.python(), {
      changed: (params) => void this.log(() => this.follower.changed(params)),
      live: (params) => void this.log(() => this.follower.live(params)),
      started: () => void this.follower.refresh(),
      ended: (problem) => this.follower.fail(problem),
    }, this.output);
    this.server = server;
    await before?.stop();
    await server.start();
  }

  private async restartForNewPython(): Promise<void> {
    if (this.python() !== this.server?.python) await this.restart();
  }

  private python(): string {
    const folder = vscode.workspace.workspaceFolders?.[0]?.uri;
    return findPython({
      setting: vscode.workspace.getConfiguration(SETTINGS_SECTION).get<string>("python", ""),
      chosen: this.choice?.path(folder) ?? null,
      folder: folder?.fsPath ?? null,
      platform: process.platform,
      exists: existsSync,
    });
  }

  private ready(): StepscopeServer {
    if (this.server === null) throw new Error("stepscope's language server is not running: restart it by \"stepscope: Restart the Language Server\"");
    return this.server;
  }

  private follow(editor: vscode.TextEditor | undefined): void {
    const document = editor?.document;
    if (document?.languageId === "python" && document.uri.scheme === "file") void this.follower.activate(document.uri.toString());
  }

  private show(shown: Shown): void {
    this.panel.show(shown);
    const words = statusWords(shown);
    if (words === null) return this.status.hide();
    this.status.text = words;
    this.status.tooltip = shown.problem ?? shown.panel?.verdict ?? "stepscope";
    this.status.show();
  }

  private commands(): vscode.Disposable[] {
    const command = (name: string, run: (uri: string, ...rest: unknown[]) => Promise<unknown>): vscode.Disposable =>
      vscode.commands.registerCommand(name, (...args: unknown[]) => this.say(() => this.onDocument(args, run)));
    return [
      command(PROFILE, (uri) => this.profile(uri)),
      command(STOP, (uri) => this.ready().execute(STOP, [uri])),
      command(PROFILE_ON_SAVE, (uri, on) => this.profileOnSave(uri, on)),
      command(SET_BATCH, (uri, wanted) => this.setBatch(uri, wanted)),
      command(OPEN_REPORT, (uri) => this.openReport(uri)),
      vscode.commands.registerCommand("stepscope.restart", () => this.restart()),
    ];
  }

  /** Code lenses name the document; the palette and the panel mean the one that is shown. */
  private async onDocument(args: readonly unknown[], run: (uri: string, ...rest: unknown[]) => Promise<unknown>): Promise<unknown> {
    const [first, ...rest] = args;
    const uri = typeof first === "string" ? first : this.follower.document;
    if (uri === null) throw new Error("open a Python training script first");
    return run(uri, ...(typeof first === "string" ? rest : []));
  }

  private receive(message: PageMessage): Promise<unknown> {
    switch (message.kind) {
      case "profile": return this.onDocument([], (uri) => this.profile(uri));
      case "stop": return this.onDocument([], (uri) => this.ready().execute(STOP, [uri]));
      case "openReport": return this.onDocument([], (uri) => this.openReport(uri));
      case "setBatch": return this.setBatch(message.uri, { batch: message.batch });
      case "jump": return this.jump(message.uri, message.line);
      case "ready": return Promise.resolve();
    }
  }

  /** What is on the screen is what is profiled: unsaved text is saved first. */
  private async profile(uri: string): Promise<unknown> {
    const open = vscode.workspace.textDocuments.find((document) => document.uri.toString() === uri);
    if (open?.isDirty && !(await open.save())) throw new Error(`${fileName(uri)} was not saved, so it was not profiled`);
    return this.ready().execute(PROFILE, [uri]);
  }

  private async profileOnSave(uri: string, on: unknown): Promise<void> {
    const setting = vscode.workspace.getConfiguration(SETTINGS_SECTION, vscode.Uri.parse(uri)).get<boolean>("profileOnSave", false);
    const next = typeof on === "boolean" ? on : !(this.profiledOnSave.get(uri) ?? setting);
    await this.ready().execute(PROFILE_ON_SAVE, [uri, next]);
    this.profiledOnSave.set(uri, next);
    vscode.window.setStatusBarMessage(`${fileName(uri)} is ${next ? "" : "no longer "}profiled when it is saved`, 5_000);
  }

  /** The server changes the number in the code, so that undo works; without a number the user is asked for one. */
  private async setBatch(uri: string, wanted: unknown): Promise<unknown> {
    const target = wanted ?? (await askForBatch(this.follower.shown.panel?.batch?.value ?? null));
    if (target === null) return null;
    try {
      return await this.ready().execute(SET_BATCH, [uri, target]);
    } finally {
      await this.follower.refresh();
    }
  }

  private async jump(uri: string, line: number): Promise<void> {
    const address = vscode.Uri.parse(uri);
    this.follower.jumpingTo(address.toString());
    const document = await vscode.workspace.openTextDocument(address);
    const at = document.lineAt(Math.min(line, document.lineCount - 1));
    const start = new vscode.Position(at.lineNumber, at.firstNonWhitespaceCharacterIndex);
    const column = vscode.window.visibleTextEditors.find((editor) => editor.document === document)?.viewColumn ?? vscode.ViewColumn.One;
    const editor = await vscode.window.showTextDocument(document, { viewColumn: column });
    editor.selection = new vscode.Selection(start, start);
    editor.revealRange(at.range, vscode.TextEditorRevealType.InCenterIfOutsideViewport);
  }

  /** As a tab of the editor: it also opens where the editor runs in a browser, far from the file. */
  private async openReport(uri: string): Promise<void> {
    const path = await this.ready().execute(OPEN_REPORT, [uri]);
    if (typeof path !== "string") return; // the server has said why
    const html = reportHtml(await readFile(path, "utf8"));
    const tab = vscode.window.createWebviewPanel("stepscope.report", `${fileName(uri)}: report`, vscode.ViewColumn.Beside, {
      enableScripts: true, localResourceRoots: [], retainContextWhenHidden: true,
    });
    tab.webview.html = html;
  }

  /** What a user asked for and did not get is said where the user looks. */
  private async say(act: () => unknown): Promise<void> {
    const problem = await this.log(act);
    if (problem !== null) void vscode.window.showErrorMessage(`stepscope: ${problem}`);
  }

  /** The failure, if it failed. */
  private async log(act: () => unknown): Promise<string | null> {
    try {
      await act();
      return null;
    } catch (error) {
      const words = error instanceof Error ? error.message : String(error);
      this.output.appendLine(words);
      return words;
    }
  }
}

async function askForBatch(now: number | null): Promise<{ batch: number } | null> {
  const text = await vscode.window.showInputBox({
    prompt: "Batch size to write into the code",
    ...(now === null ? {} : { value: String(now) }),
    validateInput: (value) => (/^[1-9]\d*$/.test(value.trim()) ? null : "a whole number, 1 or more"),
  });
  return text === undefined ? null : { batch: Number(text.trim()) };
}
