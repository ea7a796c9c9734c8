// Writes ../page/codemirror.js, and the licences of all packages in it to ../page/codemirror.LICENSE.
import { build } from "esbuild";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";

const page = new URL("../page/", import.meta.url).pathname;
const result = await build({
  entryPoints: ["entry.js"], bundle: true, minify: true, format: "esm", target: "es2022", charset: "utf8",
  metafile: true, write: false, legalComments: "none",
});
const inputs = Object.keys(result.metafile.inputs);
const folders = [...new Set(inputs.map((file) => file.match(/^node_modules\/((@[^/]+\/)?[^/]+)/)?.[1]))].filter(Boolean);
const packages = folders.sort().map((name) => {
  const folder = `node_modules/${name}`;
  const { version, license } = JSON.parse(readFileSync(`${folder}/package.json`));
  const file = readdirSync(folder).find((each) => /^licen[cs]e/i.test(each));
  return { title: `${name} ${version}`, text: `${license}\n\n${readFileSync(`${folder}/${file}`, "utf8").trim()}` };
});
const banner = `/* ${packages.map(({ title }) => title).join(", ")}; licences in codemirror.LICENSE */\n`;
writeFileSync(`${page}codemirror.js`, banner + result.outputFiles[0].text);
writeFileSync(`${page}codemirror.LICENSE`, packages.map(({ title, text }) => `${title}: ${text}\n`).join("\n---\n\n"));
