// Which Python runs the language server, and what to say when it does not run.

import { join } from "node:path";

export interface InterpreterFacts {
  /** The setting `stepscope.python`. */
  readonly setting: string;
  /** What the Python extension has chosen. */
  readonly chosen: string | null;
  readonly folder: string | null;
  readonly platform: NodeJS.Platform;
  readonly exists: (path: string) => boolean;
}

/** The setting, else the Python extension's choice, else the folder's own environment, else the system's. */
export function findPython(facts: InterpreterFacts): string {
  const setting = facts.setting.trim().replaceAll("${workspaceFolder}", facts.folder ?? ".");
  if (setting !== "") return setting;
  if (facts.chosen !== null) return facts.chosen;
  const windows = facts.platform === "win32";
  const inside = windows ? join("Scripts", "python.exe") : join("bin", "python");
  const environments = facts.folder === null ? [] : [".venv", "venv"].map((name) => join(facts.folder ?? "", name, inside));
  return environments.find(facts.exists) ?? (windows ? "python" : "python3");
}

/** -P: modules of the workspace, such as its json.py, must not run because a file was opened. */
export const serverArguments: readonly string[] = ["-P", "-m", "stepscope", "lsp"];

/** Why the server is not there, in words that say what to do. */
export function whyEnded(python: string, errorCode: string | null, stderr: string): string {
  const elsewhere = "or name another Python in the setting stepscope.python";
  if (errorCode === "ENOENT") return `${python} was not found: install Python, ${elsewhere}.`;
  if (errorCode === "EACCES") return `${python} may not be run: check its permissions, ${elsewhere}.`;
  if (errorCode === "ETIMEDOUT") return `${python} did not answer as a language server within a minute: check that it is a Python, ${elsewhere}.`;
  const install = `run "${python} -m pip install 'stepscope[editor]'", ${elsewhere}.`;
  if (/No module named '?stepscope/.test(stderr)) return `stepscope is not installed for ${python}: ${install}`;
  const missing = /No module named '?([\w.]+)/.exec(stderr)?.[1];
  if (missing !== undefined) return `stepscope's language server needs ${missing}: ${install}`;
  const last = stderr.trim().split("\n").at(-1) ?? "";
  return `stepscope's language server ended${last === "" ? "" : `: ${last}`}. Its log is under Output, stepscope; then "stepscope: Restart the Language Server".`;
}
