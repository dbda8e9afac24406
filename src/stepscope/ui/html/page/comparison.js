// The comparison's page is drawn before it is opened: only its colours change here.

import { startTheme } from "./theme.js";

startTheme(/** @type {HTMLElement} */ (document.querySelector("#theme")), () => {}, () => {});
Object.assign(window, { stepscope: { ready: Promise.resolve(true) } });
