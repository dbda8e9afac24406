// The comparison's page is drawn before it is opened: only its colours change here.

import { startTheme, themeForPaper } from "./theme.js";

startTheme(/** @type {HTMLElement} */ (document.querySelector("#theme")), () => {});
addEventListener("beforeprint", () => themeForPaper(true, () => {}));
addEventListener("afterprint", () => themeForPaper(false, () => {}));
Object.assign(window, { stepscope: { ready: Promise.resolve(true) } });
