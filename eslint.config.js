// Rules for the report's scripts and their tests.

import js from "@eslint/js";
import globals from "globals";

export default [
  js.configs.recommended,
  {
    files: ["src/stepscope/ui/html/page/*.js", "src/stepscope/ui/serve/page/*.js"],
    languageOptions: { globals: globals.browser },
    rules: {
      eqeqeq: "error",
      "no-var": "error",
      "prefer-const": "error",
      "no-unused-vars": ["error", { argsIgnorePattern: "^_" }],
      "max-lines": ["error", 450],
    },
  },
  { files: ["tests/ui/html/js/*.js", "eslint.config.js"], languageOptions: { globals: globals.node } },
];
