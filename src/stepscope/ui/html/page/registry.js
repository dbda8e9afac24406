// The panes of the report that have a script. A pane's script calls registerPane when it is loaded;
// main.js starts those whose section is in the page.

export const panes = /** @type {{ id: string, start: StartPane }[]} */ ([]);

/** @param {string} id of the pane and its section @param {StartPane} start */
export function registerPane(id, start) {
  panes.push({ id, start });
}
