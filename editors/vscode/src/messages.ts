// What the extension and the panel's page tell each other.

import type { Live, Panel } from "./contract";

/** Everything the page shows: sent whole, so that a page that was hidden is right again at once. */
export interface Shown {
  readonly kind: "shown";
  /** The script's file name, or null when no Python file is open. */
  readonly script: string | null;
  readonly uri: string | null;
  readonly panel: Panel | null;
  readonly live: Live | null;
  /** Why there is nothing to show: what happened and what to do. */
  readonly problem: string | null;
}

/** Only the running training's values moved: many a second, and nothing else needs to be drawn again. */
export interface LiveMoved {
  readonly kind: "live";
  readonly live: Live | null;
}

/** What the page must be told after it was shown something. */
export function nextToShow(before: Shown | null, now: Shown): Shown | LiveMoved {
  const same = before !== null && before.uri === now.uri && before.panel === now.panel && before.problem === now.problem;
  return same && before.live?.running === now.live?.running ? { kind: "live", live: now.live } : now;
}

export type PageMessage =
  | { readonly kind: "ready" }
  | { readonly kind: "profile" }
  | { readonly kind: "stop" }
  | { readonly kind: "openReport" }
  | { readonly kind: "setBatch"; readonly uri: string; readonly batch: number }
  | { readonly kind: "jump"; readonly uri: string; readonly line: number };

/** A message from the page, or null: pages are not trusted to send only what they should. */
export function readPageMessage(value: unknown): PageMessage | null {
  if (typeof value !== "object" || value === null) return null;
  const { kind, uri, batch, line } = value as Record<string, unknown>;
  const document = typeof uri === "string" && uri.startsWith("file:") ? uri : null;
  switch (kind) {
    case "ready": case "profile": case "stop": case "openReport":
      return { kind };
    case "setBatch":
      return document !== null && isCount(batch) && batch > 0 ? { kind, uri: document, batch } : null;
    case "jump":
      return document !== null && isCount(line) ? { kind, uri: document, line } : null;
    default:
      return null;
  }
}

const isCount = (value: unknown): value is number => Number.isSafeInteger(value) && (value as number) >= 0;
