// The panel in the side bar: draws what the follower knows, passes on what its page asks for.

import { randomBytes } from "node:crypto";

import * as vscode from "vscode";

import { nextToShow, readPageMessage, type PageMessage, type Shown } from "./messages";
import { pageHtml } from "./pageHtml";

export class PanelViewProvider implements vscode.WebviewViewProvider {
  private view: vscode.WebviewView | null = null;
  private shown: Shown | null = null;

  constructor(private readonly extension: vscode.Uri, private readonly onMessage: (message: PageMessage) => void) {}

  resolveWebviewView(view: vscode.WebviewView): void {
    const folder = vscode.Uri.joinPath(this.extension, "out");
    const { webview } = view;
    this.view = view;
    webview.options = { enableScripts: true, localResourceRoots: [folder] };
    webview.onDidReceiveMessage((value: unknown) => this.receive(value));
    view.onDidDispose(() => { this.view = null; });
    const address = (name: string): string => webview.asWebviewUri(vscode.Uri.joinPath(folder, name)).toString();
    const nonce = randomBytes(16).toString("base64url");
    webview.html = pageHtml({ script: address("page.js"), style: address("page.css"), source: webview.cspSource, nonce });
  }

  show(shown: Shown): void {
    const message = nextToShow(this.shown, shown);
    this.shown = shown;
    const running = shown.live?.running === true;
    if (this.view !== null) {
      if (running) this.view.badge = { value: 1, tooltip: "a training is running" };
      else this.view.badge = undefined;
    }
    void this.view?.webview.postMessage(message);
  }

  private receive(value: unknown): void {
    const message = readPageMessage(value);
    if (message === null) return;
    if (message.kind === "ready") {
      if (this.shown !== null) void this.view?.webview.postMessage(this.shown);
    } else this.onMessage(message);
  }
}
