// The pages of `stepscope serve`: the list that keeps itself up to date, waiting frames, what-ifs.

import { startTheme } from "./theme.js";

const REFRESH_MS = 3000;
const TYPING_MS = 200;
const OTHER_TOKEN = "stepscope serve was restarted and has a new token: open the address that it printed.";

/** @param {string} id */
const byId = (id) => document.getElementById(id);

const nothing = () => {};
const themeButton = byId("theme");
if (themeButton) startTheme(themeButton, nothing, nothing);

/** Rows are made, and escaped, by the server. @param {HTMLElement} rows */
function startList(rows) {
  const search = /** @type {HTMLInputElement} */ (byId("search"));
  const compare = /** @type {HTMLButtonElement} */ (byId("compare"));
  const ticked = new Set();
  let tag = rows.dataset.tag ?? "";
  let latest = 0;

  const boxes = () => [.../** @type {NodeListOf<HTMLInputElement>} */ (rows.querySelectorAll("input[type=checkbox]"))];
  const showTicks = () => {
    for (const box of boxes()) {
      box.checked = ticked.has(box.value);
      box.closest("tr")?.classList.toggle("is-ticked", box.checked);
    }
    compare.disabled = ticked.size !== 2;
    compare.textContent = ticked.size === 2 ? "Compare these two" : `Compare: tick two runs (${ticked.size} ticked)`;
  };

  /** The next list replaces it. @param {string} words */
  const sayProblem = (words) => {
    const status = rows.querySelector("[role=status]");
    if (status) status.textContent = words;
    tag = "";
  };

  /** @param {boolean} changed by the user: what is shown is then replaced in any case */
  const refresh = async (changed) => {
    const turn = ++latest;
    const address = `/rows${location.search}`;
    try {
      const answer = await fetch(address, { headers: changed || !tag ? {} : { "If-None-Match": tag } });
      if (turn !== latest || answer.status === 304) return;
      if (!answer.ok) {
        sayProblem(answer.status === 401 ? OTHER_TOKEN : `This list is as it was: the server answers ${answer.status}.`);
        return;
      }
      const text = await answer.text();
      if (turn !== latest) return;
      tag = answer.headers.get("etag") ?? "";
      const focused = document.activeElement instanceof HTMLInputElement ? document.activeElement.value : null;
      const hadFocus = rows.contains(document.activeElement);
      rows.innerHTML = text;
      showTicks();
      if (hadFocus) boxes().find((box) => box.value === focused)?.focus();
    } catch {
      sayProblem("stepscope serve has stopped: this list is as it was.");
    }
  };

  let typing = /** @type {ReturnType<typeof setTimeout> | undefined} */ (undefined);
  search.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => {
      const address = new URL(location.href);
      address.searchParams.set("q", search.value);
      address.searchParams.delete("page");
      history.replaceState(null, "", address);
      refresh(true);
    }, TYPING_MS);
  });
  rows.addEventListener("change", (event) => {
    const box = /** @type {HTMLInputElement} */ (event.target);
    if (box.checked) ticked.add(box.value);
    else ticked.delete(box.value);
    showTicks();
  });
  byId("ticked")?.addEventListener("submit", (event) => {
    // Of the two, one may be on another page of the list.
    event.preventDefault();
    if (ticked.size === 2) location.href = `/compare?${[...ticked].map((id) => `run=${encodeURIComponent(id)}`).join("&")}`;
  });
  addEventListener("keydown", (event) => {
    const typed = event.target instanceof HTMLInputElement && event.target.type !== "checkbox";
    if (event.key === "/" && !typed && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      search.focus();
    }
  });
  for (const box of boxes()) if (box.checked) ticked.add(box.value); // the browser kept them
  showTicks();
  setInterval(() => {
    if (document.visibilityState === "visible") refresh(false);
  }, REFRESH_MS);
}

/** @param {HTMLElement} status */
function startFrame(status) {
  const frame = /** @type {HTMLIFrameElement | null} */ (byId(status.dataset.waiting ?? ""));
  if (!frame) return;
  const done = () => (status.hidden = true);
  frame.addEventListener("load", done);
  // It may have come before this script.
  if (frame.contentDocument?.readyState === "complete" && frame.contentWindow?.location.href !== "about:blank") done();
}

/** @param {HTMLElement} place */
function startPredictions(place) {
  let latest = 0;
  /** @param {string} source */
  const show = async (source) => {
    const turn = ++latest;
    place.setAttribute("aria-busy", "true");
    let text = '<p class="note">stepscope serve has stopped.</p>';
    try {
      text = await (await fetch(source)).text();
    } catch {
      // The sentence above says it.
    }
    if (turn !== latest) return;
    place.innerHTML = text;
    place.removeAttribute("aria-busy");
  };
  const form = /** @type {HTMLFormElement} */ (byId("changes"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const words = new URLSearchParams(/** @type {any} */ (new FormData(form))).toString();
    history.replaceState(null, "", `${location.pathname}?${words}`);
    show(`${location.pathname.replace(/whatif$/, "predictions")}?${words}`);
  });
  show(place.dataset.source ?? "");
}

const rows = byId("rows");
if (rows) startList(rows);
for (const status of document.querySelectorAll("[data-waiting]")) startFrame(/** @type {HTMLElement} */ (status));
const predictions = byId("predictions");
if (predictions) startPredictions(predictions);
