// What the Python extension has chosen, where it is installed.

import * as vscode from "vscode";

export interface PythonChoice extends vscode.Disposable {
  /** The interpreter for a folder. */
  readonly path: (folder: vscode.Uri | undefined) => string | null;
}

interface Environments {
  getActiveEnvironmentPath(resource?: vscode.Uri): { readonly path: string };
  onDidChangeActiveEnvironmentPath(listener: () => void): vscode.Disposable;
}

/** The extension's own words for "whatever is first on the PATH" are no choice. */
const NO_CHOICE = ["python", "python3", ""];

/** Null where the Python extension is not there or has no such interface. */
export async function pythonChoice(changed: () => void): Promise<PythonChoice | null> {
  const extension = vscode.extensions.getExtension<{ environments?: Environments }>("ms-python.python");
  if (extension === undefined) return null;
  try {
    const environments = (await extension.activate()).environments;
    if (environments === undefined) return null;
    const listening = environments.onDidChangeActiveEnvironmentPath(changed);
    return {
      path: (folder) => {
        const { path } = environments.getActiveEnvironmentPath(folder);
        return NO_CHOICE.includes(path) ? null : path;
      },
      dispose: () => void listening.dispose(),
    };
  } catch {
    return null;
  }
}
