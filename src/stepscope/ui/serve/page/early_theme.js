// Before anything is drawn: light or dark, as chosen earlier or as the system says. theme.js has the button.
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("stepscope-theme");
  } catch {
    // Storage is refused: the system decides.
  }
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = theme === "dark" || theme === "light" ? theme : dark ? "dark" : "light";
})();
