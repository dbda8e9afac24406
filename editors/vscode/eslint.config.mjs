// Rules for the extension and its tests.

import js from "@eslint/js";
import typescript from "typescript-eslint";

export default [
  js.configs.recommended,
  ...typescript.configs.strict,
  {
    files: ["src/**/*.ts", "test/**/*.ts"],
    rules: {
      eqeqeq: "error",
      "max-lines": ["error", 450],
      "@typescript-eslint/no-unused-vars": ["error", { argsIgnorePattern: "^_" }],
    },
  },
];
