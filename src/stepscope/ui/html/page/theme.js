// Light or dark: as the system says, until somebody chooses.

import { forgetColors } from "./palette.js";

const KEY = "stepscope-theme";
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
let chosen = /** @type {string | null} */ (null);

/** A page from file:// may be refused storage: the choice then lasts as long as the page. @param {() => string | null | void} use */
function tryStorage(use) {
  try {
    return use();
  } catch {
    return null;
  }
}

/** The name that `stepscope serve` gives to a frame: the page around it has the mark and the button. */
const FRAME = "stepscope-page";

const currentTheme = () => chosen ?? (dark.matches ? "dark" : "light");

/** `onChange` and, for paper, `onPrint` draw with the new colours. @param {HTMLElement} button @param {() => void} onChange @param {() => void} onPrint */
export function startTheme(button, onChange, onPrint) {
  /** @param {string} theme @param {() => void} draw */
  const use = (theme, draw) => {
    root.dataset.theme = theme;
    forgetColors();
    draw();
  };
  const apply = () => {
    button.setAttribute("aria-pressed", String(currentTheme() === "dark"));
    use(currentTheme(), onChange);
  };
  /** @param {string | null | void} saved */
  const choose = (saved) => (chosen = saved === "dark" || saved === "light" ? saved : null);
  choose(tryStorage(() => localStorage.getItem(KEY)));
  root.classList.toggle("is-framed", window !== window.parent && window.name === FRAME);
  addEventListener("storage", (event) => {
    if (event.key !== KEY) return;
    choose(event.newValue); // in another tab, or in the page around this one
    apply();
  });
  dark.addEventListener("change", apply);
  button.addEventListener("click", () => {
    const theme = currentTheme() === "dark" ? "light" : "dark";
    chosen = theme;
    tryStorage(() => localStorage.setItem(KEY, theme));
    apply();
  });
  addEventListener("beforeprint", () => use("light", onPrint)); // paper is white whatever the screen is
  addEventListener("afterprint", () => use(currentTheme(), onPrint));
  apply();
}
