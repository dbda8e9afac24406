// Light or dark: as the system says, until somebody chooses.

import { forgetColors } from "./palette.js";

const KEY = "stepscope-theme";
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
/** @type {string | null} */
let chosen = null;

/** A page from file:// may be refused storage: the choice then lasts as long as the page. */
function savedTheme() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

function saveTheme(/** @type {string} */ theme) {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // `chosen` holds it
  }
}

const currentTheme = () => chosen ?? (dark.matches ? "dark" : "light");

/** @param {HTMLElement} button @param {() => void} onChange */
function applyTheme(button, onChange) {
  root.dataset.theme = currentTheme();
  button.setAttribute("aria-pressed", String(currentTheme() === "dark"));
  forgetColors();
  onChange();
}

/** @param {HTMLElement} button @param {() => void} onChange */
export function startTheme(button, onChange) {
  const saved = savedTheme();
  chosen = saved === "dark" || saved === "light" ? saved : null;
  dark.addEventListener("change", () => applyTheme(button, onChange));
  button.addEventListener("click", () => {
    chosen = currentTheme() === "dark" ? "light" : "dark";
    saveTheme(chosen);
    applyTheme(button, onChange);
  });
  applyTheme(button, onChange);
}

/** Paper is white whatever the screen is. @param {boolean} printing @param {() => void} onChange */
export function themeForPaper(printing, onChange) {
  root.dataset.theme = printing ? "light" : currentTheme();
  forgetColors();
  onChange();
}
