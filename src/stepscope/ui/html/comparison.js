// The comparison's page is drawn before it is opened: only its colours change here.

(() => {
  const button = document.querySelector("#theme");
  Theme.start(button, () => button.setAttribute("aria-pressed", String(Theme.current() === "dark")));
  addEventListener("beforeprint", () => Theme.onPaper(true, () => {}));
  addEventListener("afterprint", () => Theme.onPaper(false, () => {}));
  window.stepscope = { ready: Promise.resolve(true) };
})();
