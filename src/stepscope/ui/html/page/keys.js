// The keyboard. Letters work anywhere on the page except where text is typed.

/** @type {Record<string, [number, number]>} */
const ARROWS = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };

/** @param {Timeline} timeline @param {HTMLDialogElement} help */
export function listenToKeys(timeline, help) {
  const letters = timeline.letters();

  /** In the search box. @param {KeyboardEvent} event */
  function searchKey({ key, shiftKey }) {
    if (key === "Escape") {
      timeline.clear();
      timeline.search.blur();
    } else if (key === "Enter" || key === "ArrowDown" || key === "ArrowUp") {
      timeline.step(key === "ArrowUp" || shiftKey ? -1 : 1);
    } else return false;
    return true;
  }

  function arrowKey(/** @type {string} */ key) {
    const by = ARROWS[key];
    if (!by) return false;
    if (timeline.matches?.events.length) timeline.step(by[0] + by[1]);
    else timeline.moveSelection(...by);
    return true;
  }

  function pageKey(/** @type {string} */ key) {
    if (key === "Escape") timeline.clear();
    else if (key === "/") timeline.search.focus();
    else if (key === "?") toggleHelp(help);
    else if (letters[key.toLowerCase()]) letters[key.toLowerCase()]();
    else return document.activeElement === timeline.scroller && arrowKey(key);
    return true;
  }

  document.addEventListener("keydown", (event) => {
    if (help.open && event.key === "?") {
      help.close();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || help.open || event.defaultPrevented) return;
    if (!timeline.scene && event.key !== "?") return;
    const target = event.target instanceof Element ? event.target : null;
    const typing = target?.matches("input, select");
    if (typing ? target === timeline.search && searchKey(event) : pageKey(event.key)) event.preventDefault();
  });
}

export function toggleHelp(/** @type {HTMLDialogElement} */ help) {
  if (help.open) help.close();
  else help.showModal();
}
