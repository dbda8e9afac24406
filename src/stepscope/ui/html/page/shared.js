// Words that Python and the page share: report.py and comparison.py send them in one block.

/** @type {Shared} */
export const SHARED = JSON.parse(document.querySelector("#shared")?.textContent ?? "{}");
