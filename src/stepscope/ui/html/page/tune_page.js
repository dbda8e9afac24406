// The tune's page is drawn before it is opened: its colours change here, and its patch is copied.

import { startCopying } from "./copy.js";
import { startTheme } from "./theme.js";

startTheme(/** @type {HTMLElement} */ (document.querySelector("#theme")), () => {}, () => {});
startCopying();
Object.assign(window, { stepscope: { ready: Promise.resolve(true) } });
