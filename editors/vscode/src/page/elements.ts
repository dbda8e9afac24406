// Making parts of the page. Text goes in as text: names in scripts may look like HTML.

export function element<T extends keyof HTMLElementTagNameMap>(tag: T, className = "", ...children: (Node | string)[]): HTMLElementTagNameMap[T] {
  const part = document.createElement(tag);
  if (className !== "") part.className = className;
  part.append(...children);
  return part;
}

export function button(text: string, onClick: () => void, className = ""): HTMLButtonElement {
  const part = element("button", className, text);
  part.type = "button";
  part.addEventListener("click", onClick);
  return part;
}

/** A titled part of the panel. */
export function section(title: string, ...children: Node[]): HTMLElement {
  return element("section", "", element("h2", "", title), ...children);
}

/** Set by script: the page's policy allows no style attributes. */
export function place(part: HTMLElement, style: Readonly<Record<string, string>>): void {
  for (const [name, value] of Object.entries(style)) part.style.setProperty(name, value);
}

export const share = (part: number): string => `${(100 * Math.min(1, Math.max(0, part))).toFixed(3)}%`;
