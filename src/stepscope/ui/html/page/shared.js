// Words that Python and the page share: report.py and comparison.py send them in one block.

/**
 * @typedef {object} Shared
 * @property {string[]} classes classes of events, by number
 * @property {Record<string, string>} classWords what a tip calls an event of each class
 * @property {string[]} causes causes of idle gaps, by number
 * @property {Record<string, string>} causeLabels
 * @property {string[]} collectives kinds of collectives
 * @property {string[]} names words that keep their small letter at the start of a sentence
 */

/** @type {Shared} */
export const SHARED = JSON.parse(document.querySelector("#shared")?.textContent ?? "{}");
