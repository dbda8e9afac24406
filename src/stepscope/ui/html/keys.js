// The keyboard. Letters work anywhere on the page except where text is typed.

function listenToKeys(timeline, help) {
  const letters = {
    w: () => timeline.zoom(1 / 1.35), s: () => timeline.zoom(1.35),
    a: () => timeline.pan(-0.18), d: () => timeline.pan(0.18),
    f: () => timeline.fit(), 0: () => timeline.reset(),
  };

  function typed(event) {
    const { key } = event;
    if (key === "Escape") {
      timeline.clear();
      timeline.search.blur();
    } else if (event.target === timeline.search && (key === "Enter" || key === "ArrowDown" || key === "ArrowUp")) {
      timeline.step(key === "ArrowUp" || event.shiftKey ? -1 : 1);
    } else return false;
    return true;
  }

  function arrows(key) {
    const by = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[key];
    if (!by) return false;
    if (timeline.found?.events.length) timeline.step(by[0] + by[1]);
    else timeline.neighbour(...by);
    return true;
  }

  function pressed(event) {
    const { key } = event;
    if (key === "Escape") timeline.clear();
    else if (key === "/") timeline.search.focus();
    else if (key === "?") toggleHelp(help);
    else if (letters[key.toLowerCase()]) letters[key.toLowerCase()]();
    else return document.activeElement === timeline.scroller && arrows(key);
    return true;
  }

  document.addEventListener("keydown", (event) => {
    if (help.open && event.key === "?") {
      help.close();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || help.open || event.defaultPrevented) return;
    const typing = event.target.matches?.("input, select");
    if (!timeline.scene && event.key !== "?") return;
    if (typing ? event.target === timeline.search && typed(event) : pressed(event)) event.preventDefault();
  });
}

function toggleHelp(help) {
  if (help.open) help.close();
  else help.showModal();
}
