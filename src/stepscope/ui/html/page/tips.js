// Tips on parts of the page that carry their words: the first line is the title.

import { fillTip, placeTip } from "./dom.js";

/** @param {HTMLElement} root @param {HTMLElement} tip */
export function startTips(root, tip) {
  const partOf = (/** @type {EventTarget | null} */ target) =>
    (target instanceof Element ? /** @type {HTMLElement | SVGElement | null} */ (target.closest("[data-tip]")) : null);
  root.addEventListener("pointermove", (event) => {
    const part = partOf(event.target);
    if (!part) {
      tip.hidden = true;
      return;
    }
    fillTip(tip, (part.dataset.tip ?? "").split("\n"));
    placeTip(tip, event);
  });
  root.addEventListener("pointerleave", () => { tip.hidden = true; });
  root.addEventListener("focusin", (event) => {
    const part = partOf(event.target);
    tip.hidden = !part;
    if (!part || !(event.target instanceof Element && event.target.matches(":focus-visible"))) return;
    const box = part.getBoundingClientRect();
    fillTip(tip, (part.dataset.tip ?? "").split("\n"));
    placeTip(tip, new MouseEvent("focus", { clientX: box.left, clientY: box.bottom - 10 }));
  });
  root.addEventListener("focusout", () => { tip.hidden = true; });
}
