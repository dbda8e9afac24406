// The language server's process and the connection to it.

import { spawn, type ChildProcess } from "node:child_process";

import * as vscode from "vscode";
import {
  CloseAction, ErrorAction, ExecuteCommandRequest, LanguageClient, State,
  type CloseHandlerResult, type DynamicFeature, type ErrorHandler, type LanguageClientOptions, type StaticFeature,
} from "vscode-languageclient/node";

import { CHANGED_NOTIFICATION, LIVE_NOTIFICATION, PANEL_REQUEST, SERVER_COMMANDS, SETTINGS, SETTINGS_SECTION } from "./contract";
import { serverArguments, whyEnded } from "./interpreter";

/** The library's client, less what the extension says and does itself. */
class QuietClient extends LanguageClient {
  /** Commands are registered by the extension: they must exist before the server runs, and say why when it does not. */
  override registerFeature(feature: StaticFeature | DynamicFeature<unknown>): void {
    if ("registrationType" in feature && feature.registrationType.method === ExecuteCommandRequest.method) return;
    super.registerFeature(feature);
  }

  /** The panel says what happened and what to do; here it is only logged. */
  override error(message: string, data?: unknown): void {
    super.error(message, data, false);
  }

  /** Stopping what never started is no failure. */
  override async stop(timeout?: number): Promise<void> {
    try {
      await super.stop(timeout);
    } catch (error) {
      this.info(`stopped before it had started: ${String(error)}`, undefined, false);
    }
  }
}

export interface ServerEvents {
  readonly changed: (params: unknown) => void;
  readonly live: (params: unknown) => void;
  readonly started: () => void;
  /** Why it ended, and what to do. */
  readonly ended: (problem: string) => void;
}

const KEPT_STDERR = 4_000;
const LAST_WORDS_MS = 3_000;
const START_LIMIT_MS = 60_000;
const RESTARTS = 3;

export class StepscopeServer {
  private readonly client: QuietClient;
  private readonly extraCommands: vscode.Disposable[] = [];
  private stderr = "";
  private errorCode: string | null = null;
  /** When all that the process had to say has been read. */
  private allSaid: Promise<void> = Promise.resolve();
  private child: ChildProcess | null = null;
  private initialized = false;
  private stopped = false;
  private restarts = 0;
  /** Settled when the server answers or has failed to. */
  private answering: Promise<void> = Promise.resolve();

  constructor(readonly python: string, private readonly events: ServerEvents, private readonly output: vscode.OutputChannel) {
    this.client = new QuietClient("stepscope", "stepscope", () => Promise.resolve(this.startProcess()), this.clientOptions());
    this.client.onNotification(CHANGED_NOTIFICATION, events.changed);
    this.client.onNotification(LIVE_NOTIFICATION, events.live);
    this.client.onDidChangeState(({ newState }) => { if (newState === State.Running) this.becomeReady(); });
  }

  start(): Promise<void> {
    this.answering = this.stopped ? Promise.resolve() : this.startOnce();
    return this.answering;
  }

  async stop(): Promise<void> {
    this.stopped = true;
    this.extraCommands.splice(0).forEach((command) => void command.dispose());
    if (this.client.isRunning()) await this.client.stop();
    else this.child?.kill();
  }

  async panel(uri: string): Promise<unknown> {
    await this.mustRun();
    return this.client.sendRequest(PANEL_REQUEST, { uri });
  }

  async execute(command: string, args: readonly unknown[]): Promise<unknown> {
    await this.mustRun();
    return this.client.sendRequest(ExecuteCommandRequest.type, { command, arguments: [...args] });
  }

  /** A program that takes requests and never answers is ended: it is no language server. */
  private async startOnce(): Promise<void> {
    const limit = setTimeout(() => {
      this.errorCode = "ETIMEDOUT";
      this.child?.kill();
    }, START_LIMIT_MS);
    try {
      await this.client.start();
    } catch {
      await this.tellWhyEnded();
    } finally {
      clearTimeout(limit);
    }
  }

  private async mustRun(): Promise<void> {
    await this.answering;
    if (!this.client.isRunning()) throw new Error(this.problem());
  }

  private problem(): string {
    return whyEnded(this.python, this.errorCode, this.stderr);
  }

  private startProcess(): ChildProcess {
    this.stderr = "";
    this.errorCode = null;
    const folder = vscode.workspace.workspaceFolders?.[0]?.uri.fsPath;
    const child = spawn(this.python, [...serverArguments], { cwd: folder, stdio: "pipe" });
    child.on("error", (error: NodeJS.ErrnoException) => { this.errorCode = error.code ?? error.message; });
    child.stderr.setEncoding("utf8").on("data", (text: string) => { this.stderr = (this.stderr + text).slice(-KEPT_STDERR); });
    this.child = child;
    this.allSaid = new Promise((resolve) => { child.once("close", () => resolve()).once("error", () => resolve()); });
    return child;
  }

  /** The connection breaks before the last words arrive. */
  private async tellWhyEnded(): Promise<void> {
    await Promise.race([this.allSaid, new Promise((resolve) => { setTimeout(resolve, LAST_WORDS_MS); })]);
    if (!this.stopped) this.events.ended(this.problem());
  }

  private clientOptions(): LanguageClientOptions {
    const settings = vscode.workspace.getConfiguration(SETTINGS_SECTION);
    return {
      documentSelector: [{ language: "python", scheme: "file" }],
      synchronize: { configurationSection: SETTINGS_SECTION },
      initializationOptions: { ...settingsOf(settings), python: this.python },
      outputChannel: this.output,
      errorHandler: this.errorHandler(),
      initializationFailedHandler: () => false,
      middleware: {
        workspace: {
          configuration: async (params, token, next) => {
            const answers = await next(params, token);
            return Array.isArray(answers) ? answers.map((answer) => this.withPython(answer)) : answers;
          },
        },
      },
    };
  }

  /** The server is told the Python that was found, not an empty setting. */
  private withPython(answer: unknown): unknown {
    return typeof answer === "object" && answer !== null && "python" in answer ? { ...answer, python: this.python } : answer;
  }

  private errorHandler(): ErrorHandler {
    return {
      error: () => ({ action: ErrorAction.Continue, handled: true }),
      closed: () => this.closed(),
    };
  }

  /** A server that never spoke will not do so next time; one that broke later is started again a few times. */
  private async closed(): Promise<CloseHandlerResult> {
    await this.tellWhyEnded();
    if (this.stopped || !this.initialized || this.restarts >= RESTARTS) return { action: CloseAction.DoNotRestart, handled: true };
    this.restarts += 1;
    return { action: CloseAction.Restart, handled: true };
  }

  private becomeReady(): void {
    this.initialized = true;
    this.registerExtraCommands();
    this.events.started();
  }

  /** Commands of code actions that only the server knows. */
  private registerExtraCommands(): void {
    const offered = this.client.initializeResult?.capabilities.executeCommandProvider?.commands ?? [];
    const ours: readonly string[] = SERVER_COMMANDS;
    this.extraCommands.splice(0).forEach((command) => void command.dispose());
    for (const command of offered.filter((name) => !ours.includes(name))) {
      this.extraCommands.push(vscode.commands.registerCommand(command, (...args: unknown[]) => this.execute(command, args)));
    }
  }
}

function settingsOf(settings: vscode.WorkspaceConfiguration): Record<string, unknown> {
  return Object.fromEntries(SETTINGS.map((name) => [name, settings.get(name)]));
}
