// Words that Python and the page share: report.py and comparison.py send them in one block.

export const SHARED = /** @type {Shared} */ (JSON.parse(document.querySelector("#shared")?.textContent ?? "{}"));
