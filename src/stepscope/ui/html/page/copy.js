// Buttons that copy a text: a path, a command, a patch.

import { partsIn } from "./dom.js";

async function copyText(/** @type {HTMLElement} */ button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(button.dataset.copy ?? "");
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select the text to copy it";
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}

export function startCopying() {
  partsIn(document, "[data-copy]").forEach((button) => button.addEventListener("click", () => copyText(button)));
}
