// Starts the panel's page inside VS Code.

import type { Shown } from "../messages";
import { PanelView } from "./view";

declare function acquireVsCodeApi(): { postMessage(message: unknown): void };

const editor = acquireVsCodeApi();
const view = new PanelView(document.body, (message) => editor.postMessage(message));
window.addEventListener("message", (event: MessageEvent<Shown>) => {
  if (event.data.kind === "shown") view.show(event.data);
});
editor.postMessage({ kind: "ready" });
