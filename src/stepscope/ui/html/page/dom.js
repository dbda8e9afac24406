// Parts of the page: finding them, making them, and the tip next to the pointer.

/** @param {ParentNode} root @param {string} selector @returns {HTMLElement} */
export const partIn = (root, selector) => /** @type {HTMLElement} */ (root.querySelector(selector));

/** @param {ParentNode} root @param {string} selector @returns {HTMLElement[]} */
export const partsIn = (root, selector) => [.../** @type {NodeListOf<HTMLElement>} */ (root.querySelectorAll(selector))];

/** @param {ParentNode} root @param {string} selector @returns {HTMLCanvasElement} */
export const canvasIn = (root, selector) => /** @type {HTMLCanvasElement} */ (root.querySelector(selector));

/** @param {ParentNode} root @param {string} selector @returns {HTMLInputElement} */
export const inputIn = (root, selector) => /** @type {HTMLInputElement} */ (root.querySelector(selector));

/** @template {keyof HTMLElementTagNameMap} T @param {T} tag */
export function element(tag, className = "", text = "") {
  const part = document.createElement(tag);
  part.className = className;
  part.textContent = text;
  return part;
}

/** Text with what stands between its backticks as code. @param {string} text */
export const codeParts = (text) => text.split("`").map((part, i) => (i % 2 ? element("code", "", part) : part));

/** @param {string} text @param {() => void} onClick */
export function button(text, onClick, className = "") {
  const part = element("button", className, text);
  part.type = "button";
  part.addEventListener("click", onClick);
  return part;
}

/** @param {HTMLElement} tip @param {string[]} words a title and lines under it */
export function fillTip(tip, [title, ...lines]) {
  const strong = element("strong", "", title.length > 220 ? `${title.slice(0, 220)}…` : title);
  tip.replaceChildren(strong, ...lines.map((line) => element("div", "", line)));
  tip.hidden = false;
}

/** Next to the pointer, but never out of the window. @param {HTMLElement} tip @param {MouseEvent} pointer */
export function placeTip(tip, pointer) {
  const box = tip.getBoundingClientRect();
  const x = Math.min(pointer.clientX + 14, window.innerWidth - box.width - 10);
  const below = pointer.clientY + 18;
  const y = below + box.height > window.innerHeight - 8 ? pointer.clientY - box.height - 12 : below;
  tip.style.left = `${Math.max(6, x)}px`;
  tip.style.top = `${Math.max(6, y)}px`;
}
