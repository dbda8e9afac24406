// The laboratory's page is drawn before it is opened: here one schedule is chosen and played step by step.

import { startTheme } from "./theme.js";

const STEP_MS = 900;

/** @template {HTMLElement} E @param {string} id @returns {E} */
const byId = (id) => /** @type {E} */ (document.querySelector(`#${id}`));

const chooser = /** @type {HTMLSelectElement} */ (byId("steps-algorithm"));
const range = /** @type {HTMLInputElement} */ (byId("steps-range"));
const button = /** @type {HTMLButtonElement} */ (byId("steps-play"));
const now = /** @type {HTMLOutputElement} */ (byId("steps-now"));
const figures = /** @type {HTMLElement[]} */ ([...document.querySelectorAll("figure.schedule")]);
let timer = 0;

const chosen = () => figures.find((figure) => figure.dataset.algorithm === chooser.value) ?? figures[0];

/** Later steps fade. @param {number} step */
function showStep(step) {
  const last = Number(chosen().dataset.steps);
  range.value = String(step);
  now.textContent = step === 0 ? "start" : `${step} of ${last}`;
  for (const row of chosen().querySelectorAll("[data-step]")) {
    row.classList.toggle("is-later", Number(row.getAttribute("data-step")) > step);
  }
}

function pause() {
  clearInterval(timer);
  timer = 0;
  button.textContent = "Play";
  button.setAttribute("aria-pressed", "false");
}

function play() {
  const last = Number(chosen().dataset.steps);
  if (Number(range.value) >= last) {
    showStep(0);
  }
  button.textContent = "Pause";
  button.setAttribute("aria-pressed", "true");
  timer = window.setInterval(() => {
    showStep(Number(range.value) + 1);
    if (Number(range.value) >= last) {
      pause();
    }
  }, STEP_MS);
}

function choose() {
  pause();
  for (const figure of figures) {
    figure.hidden = figure !== chosen();
  }
  range.max = chosen().dataset.steps ?? "0";
  showStep(Number(range.max));
}

startTheme(/** @type {HTMLElement} */ (document.querySelector("#theme")), () => {}, () => {});
chooser.addEventListener("change", choose);
range.addEventListener("input", () => {
  pause();
  showStep(Number(range.value));
});
button.addEventListener("click", () => (timer ? pause() : play()));
choose();
Object.assign(window, { stepscope: { ready: Promise.resolve(true) } });
