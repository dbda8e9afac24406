// Light or dark: as the system says, until somebody chooses.

const Theme = (() => {
  const KEY = "stepscope-theme";
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;

  // A page from file:// may be refused storage: the choice then lasts as long as the page.
  function remembered() {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null;
    }
  }

  function remember(theme) {
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // kept in `chosen`
    }
  }

  const current = () => chosen || (dark.matches ? "dark" : "light");

  function apply(onChange) {
    root.dataset.theme = current();
    Palette.forget();
    onChange();
  }

  function start(button, onChange) {
    const saved = remembered();
    chosen = saved === "dark" || saved === "light" ? saved : null;
    dark.addEventListener("change", () => apply(onChange));
    button.addEventListener("click", () => {
      chosen = current() === "dark" ? "light" : "dark";
      remember(chosen);
      apply(onChange);
    });
    apply(onChange);
  }

  // Paper is white whatever the screen is.
  function onPaper(printing, onChange) {
    root.dataset.theme = printing ? "light" : current();
    Palette.forget();
    onChange();
  }

  return { start, current, onPaper };
})();
