// Which script the panel shows, and what is known about it: asks the server, drops answers that came too late.

import { readChanged, readLive, readPanel, type Live, type Panel } from "./contract";
import type { Shown } from "./messages";
import { fileName } from "./model/words";

export interface FollowerOptions {
  /** `stepscope/panel` of one document. */
  readonly ask: (uri: string) => Promise<unknown>;
  readonly show: (shown: Shown) => void;
}

export class PanelFollower {
  private uri: string | null = null;
  private panel: Panel | null = null;
  private problem: string | null = null;
  private readonly running = new Map<string, Live>();
  private opened: string | null = null;
  private asking = false;
  private askAgain = false;

  constructor(private readonly options: FollowerOptions) {}

  get document(): string | null {
    return this.uri;
  }

  get shown(): Shown {
    const live = this.uri === null ? null : (this.running.get(this.uri) ?? null);
    const script = this.uri === null ? null : fileName(this.uri);
    return { kind: "shown", script, uri: this.uri, panel: this.panel, live, problem: this.problem };
  }

  /** A Python document became the active one. */
  async activate(uri: string): Promise<void> {
    const ours = this.opened === uri;
    this.opened = null;
    if (ours || uri === this.uri) return;
    this.uri = uri;
    this.panel = null;
    this.problem = null;
    this.tell();
    await this.refresh();
  }

  /** The panel itself opens a file: a jump into a model must not take the script's panel away. */
  jumpingTo(uri: string): void {
    if (uri !== this.uri) this.opened = uri;
  }

  async changed(params: unknown): Promise<void> {
    if (readChanged(params) === this.uri) await this.refresh();
  }

  live(params: unknown): void {
    const live = readLive(params);
    if (live.running) this.running.set(live.uri, live);
    else this.running.delete(live.uri);
    if (live.uri === this.uri) this.tell();
  }

  /** The server ended: what ran with it does no longer. */
  fail(problem: string): void {
    this.running.clear();
    this.problem = problem;
    this.tell();
  }

  /** Ask for the panel; while an answer is awaited, one more question at most is kept. */
  async refresh(): Promise<void> {
    if (this.asking) {
      this.askAgain = true;
      return;
    }
    this.asking = true;
    try {
      do {
        this.askAgain = false;
        await this.askOnce();
      } while (this.askAgain);
    } finally {
      this.asking = false;
    }
  }

  private async askOnce(): Promise<void> {
    const uri = this.uri;
    if (uri === null) return;
    try {
      const panel = readPanel(await this.options.ask(uri));
      if (uri !== this.uri) return;
      this.panel = panel;
      this.problem = null;
    } catch (error) {
      if (uri !== this.uri) return;
      this.problem = error instanceof Error ? error.message : String(error);
    }
    this.tell();
  }

  private tell(): void {
    this.options.show(this.shown);
  }
}
