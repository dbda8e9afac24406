// Bundles the extension, the panel's page and the tests: `node esbuild.mjs extension|tests`.

import { copyFileSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";

import { build } from "esbuild";

/** The report's figures are written by the same code here; the words it reads from its page are not needed. */
const reportFigures = {
  name: "report-figures",
  setup(plugins) {
    plugins.onResolve({ filter: /^\.\/shared\.js$/ }, () => ({ path: "shared", namespace: "no-words" }));
    plugins.onLoad({ filter: /.*/, namespace: "no-words" }, () => ({ contents: "export const SHARED = { names: [] };" }));
  },
};
const common = { bundle: true, charset: "utf8", logLevel: "warning", plugins: [reportFigures] };
const node = { ...common, platform: "node", target: "node20" };

/** Licences of the packages that went into a bundle. */
function licences(metafile) {
  const inside = Object.keys(metafile.inputs).map((path) => /^(?:.*node_modules\/)((?:@[^/]+\/)?[^/]+)\//.exec(path));
  const folders = [...new Map(inside.filter(Boolean).map(([start, name]) => [name, start])).entries()].sort();
  return folders.map(([name, folder]) => {
    const file = readdirSync(folder).find((one) => /^licen[cs]e/i.test(one));
    if (file === undefined) throw new Error(`${folder} has no licence file: it cannot be bundled`);
    return `${name}\n\n${readFileSync(folder + file, "utf8").trim()}\n`;
  }).join(`\n${"-".repeat(80)}\n\n`);
}

async function bundleExtension() {
  const { metafile } = await build({ ...node, metafile: true, entryPoints: ["src/extension.ts"], outfile: "out/extension.js", format: "cjs", external: ["vscode"], minify: true });
  await build({ ...common, entryPoints: ["src/page/main.ts"], outfile: "out/page.js", format: "iife", target: "chrome120", minify: true });
  await build({ ...common, entryPoints: ["src/page/panel.css"], outfile: "out/page.css", target: "chrome120", minify: true });
  writeFileSync("out/licences.txt", licences(metafile));
  copyFileSync("../../LICENSE", "LICENSE");
  mkdirSync("dist", { recursive: true });
}

async function bundleTests() {
  rmSync("out/test", { recursive: true, force: true });
  const files = readdirSync("test").filter((name) => name.endsWith(".ts"));
  await build({
    ...node, entryPoints: files.map((name) => `test/${name}`), outdir: "out/test", outExtension: { ".js": ".mjs" },
    format: "esm", packages: "external",
  });
}

await { extension: bundleExtension, tests: bundleTests }[process.argv[2] ?? "extension"]();
