// Starts the panel's page inside VS Code.

import type { LiveMoved, Shown } from "../messages";
import { PanelView } from "./view";

declare function acquireVsCodeApi(): { postMessage(message: unknown): void };

const editor = acquireVsCodeApi();
const view = new PanelView(document.body, (message) => editor.postMessage(message));
window.addEventListener("message", (event: MessageEvent<Shown | LiveMoved>) => {
  if (event.data.kind === "shown") view.show(event.data);
  else if (event.data.kind === "live") view.showLive(event.data.live);
});
editor.postMessage({ kind: "ready" });
