// The panes of the report that have a script. A pane's script calls registerPane when it is loaded;
// main.js starts those whose section is in the page.

/** @typedef {import("./payload.js").RankData} RankData */

/**
 * What a pane may ask of the page.
 * @typedef {object} Page
 * @property {(number: number) => void} pickRank show this rank in every pane
 * @property {(name: string) => void} findEvent search for an event in the timeline
 */

/**
 * What the page may ask of a pane; a pane leaves out what it does not need.
 * @typedef {object} PaneScript
 * @property {Promise<void>} [ready] resolved when the pane's own data is unpacked
 * @property {(data: RankData | null, problem: string) => void} [showRank] null when it could not be unpacked
 * @property {() => void} [draw] at the next frame, because colours changed
 * @property {() => void} [drawNow] at once, for printing
 * @property {(name: string) => void} [findEvent]
 * @property {() => object} [state] for tests and scripts
 * @property {Record<string, unknown>} [handle] added to window.stepscope
 */

/** @typedef {(section: HTMLElement, page: Page) => PaneScript} StartPane */

/** @type {{ id: string, start: StartPane }[]} */
export const panes = [];

/** @param {string} id of the pane and its section @param {StartPane} start */
export function registerPane(id, start) {
  panes.push({ id, start });
}
