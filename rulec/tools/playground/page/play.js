// The page: an editor on one side; formula, costs, kernel, path and race of its rule on the other.
import { ask, element, get, key, latest, marked, table } from "./ask.js";
import { makeEditor, makeViewer } from "./editor.js";
import { linked, linkTo } from "./link.js";
import { makePath } from "./path.js";
import { makeRace } from "./race.js";

const $ = (id) => document.getElementById(id);
const PAUSE = 250; // milliseconds after the last key

const started = await get("start");
if (!started.ok) {
  $("mistakes").replaceChildren(element("p", { class: "problem" }, await started.text()));
  throw new Error("no key");
}
const start = await started.json();
// The last text without mistakes, and what the server said of it.
let shown = null;

// The text that the page opens with: that of its link; or of the page before a reload, as long as the server runs.
const link = await linked(location.hash);
const kept = !link && sessionStorage.getItem("key") === key;
const [first, firstFile] = kept ? ["text", "file"].map((name) => sessionStorage.getItem(name))
  : link && !link.problem ? [link.text, "linked.yaml"] : [start.text, start.file];
$("link-problem").hidden = !link?.problem;
$("link-problem").textContent = link?.problem ?? "";
history.replaceState(null, "", `#${key}`);
addEventListener("hashchange", () => location.reload()); // the address of another link

function keep() {
  for (const [name, value] of [["key", key], ["text", editor.text()], ["file", file]]) sessionStorage.setItem(name, value);
}

let file = firstFile;
const editor = makeEditor($("editor"), { text: first, changed, ask });
const viewers = { kernel: makeViewer($("source"), "The kernel"), assembly: makeViewer($("machine-code"), "The machine code") };
const path = makePath(start.functions, () => shown);
const race = makeRace(start.tasks, () => shown);

let timer = 0;
function changed() {
  keep();
  clearTimeout(timer);
  timer = setTimeout(check, PAUSE);
}

const check = latest(async () => {
  const text = editor.text();
  const [{ answer: mistakes, error }, look] = await Promise.all([ask("mistakes", { text }), ask("look", { text })]);
  if (text !== editor.text()) return;
  if (error || mistakes.some((mistake) => !mistake.warning)) {
    tell(error ? [{ message: error, line: 0, column: 0, width: 0 }] : mistakes);
    return;
  }
  tell(look.error ? [{ message: look.error, line: 0, column: 0, width: 0 }] : mistakes);
  if (look.error) return;
  shown = { text, ...look.answer };
  show();
  update();
});

// Marks mistakes in the editor, and lists them below it.
function tell(mistakes) {
  editor.mark(mistakes);
  const wrong = mistakes.some((mistake) => !mistake.warning);
  $("stale").hidden = !wrong;
  $("stale").textContent = shown ? "This is the last text without mistakes." : "The rule is shown here once its text has no mistakes.";
  $("shown").classList.toggle("old", wrong);
  const items = mistakes.map((mistake) => {
    const [sentence] = mistake.message.split("\n");
    const button = element("button", { type: "button" }, element("b", {}, `line ${mistake.line + 1}`), ` ${sentence}`);
    button.addEventListener("click", () => editor.go(mistake));
    return element("li", { class: mistake.warning ? "warning" : "" }, button);
  });
  $("mistakes").replaceChildren(items.length ? element("ul", {}, ...items) : element("p", { class: "good" }, "No mistakes."));
}

function show() {
  $("shown").hidden = false;
  $("name").textContent = shown.name;
  $("summary").textContent = shown.summary;
  const { authors, title, url, year } = shown.paper;
  const cited = [authors, title, year].filter(Boolean).join(", ");
  const safe = /^https?:/.test(url ?? "");
  $("paper").replaceChildren(safe ? element("a", { href: url, target: "_blank", rel: "noreferrer" }, cited) : cited);
  katex.render(shown.formula, $("formula"), { displayMode: true, throwOnError: false });
  $("around").textContent = shown.around ? `A wrapper: shown and run around ${shown.around}.` : "";
  const several = shown.costs.length > 1;
  $("cost-tables").replaceChildren(...shown.costs.flatMap(({ rule, shapes, lines }) => [
    ...(several ? [element("h3", {}, `Tensors of shape ${shapes.join(" and ")}, by ${rule}`)] : []), table(lines),
  ]));
  $("analysis").replaceChildren(table(shown.analysis.map(([head, text]) => [head, element("span", {}, ...marked(text))])));
  path.change();
}

// Tabs: what a panel shows is asked for when it is seen.
const tabs = [...document.querySelectorAll('[role="tab"]')];
const panels = {
  look: () => {}, kernel: latest(() => code("kernel")), assembly: latest(() => code("assembly")), path: path.update, race: () => {},
};
let selected = "look";

function select(tab) {
  for (const each of tabs) {
    const on = each === tab;
    each.setAttribute("aria-selected", on);
    each.tabIndex = on ? 0 : -1;
    $(each.getAttribute("aria-controls")).hidden = !on;
  }
  selected = tab.getAttribute("aria-controls");
  update();
}

function update() {
  if (shown) panels[selected]();
}

for (const [index, tab] of tabs.entries()) {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", ({ key }) => {
    const next = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: -1 }[key];
    if (next === undefined) return;
    const other = tabs.at(next % tabs.length);
    select(other);
    other.focus();
  });
}

// The source of the kernel, or its machine code, in the panel of this name.
async function code(panel) {
  const backend = document.querySelector(`#${panel} input:checked`).value;
  const { answer, error } = await ask(panel, { text: shown.text, backend });
  $(`${panel}-problem`).hidden = !error;
  $(`${panel}-problem`).textContent = error ?? "";
  document.querySelector(`#${panel} .code`).hidden = Boolean(error);
  if (answer) viewers[panel](answer.source, answer.language);
}

for (const [choices, titles] of [["backends", start.backends], ["machines", start.machines]]) {
  for (const [index, [backend, title]] of Object.entries(titles).entries()) {
    const input = element("input", { type: "radio", name: choices, value: backend, checked: index === 0 });
    input.addEventListener("change", update);
    $(choices).append(element("label", {}, input, element("span", {}, title)));
  }
}

// The bar above.
$("file").textContent = file;
$("rules").append(...start.rules.map((name) => element("option", { value: name })));

async function open(name) {
  const response = await get(`rule/${encodeURI(name)}`);
  if (!response.ok) return false;
  file = `${name.split("/").at(-1)}.yaml`;
  editor.replace(await response.text());
  $("file").textContent = file;
  return true;
}

$("open-name").addEventListener("input", async ({ target }) => {
  if (start.rules.includes(target.value) && await open(target.value)) target.setCustomValidity("");
});
$("open").addEventListener("submit", async (event) => {
  event.preventDefault();
  const field = $("open-name");
  const opened = start.rules.includes(field.value) && await open(field.value);
  field.setCustomValidity(opened ? "" : "The library has no rule of this name.");
  field.reportValidity();
});
$("open-name").addEventListener("input", ({ target }) => target.setCustomValidity(""));

for (const [id, content] of [["copy", () => editor.text()], ["copy-link", () => linkTo(editor.text())]]) {
  const name = $(id).textContent;
  $(id).addEventListener("click", async ({ target }) => {
    const done = await navigator.clipboard.writeText(await content()).then(() => true, () => false);
    target.textContent = done ? "Copied" : "Not allowed";
    setTimeout(() => { target.textContent = name; }, 1500);
  });
}
$("download").addEventListener("click", () => {
  const link = element("a", { href: URL.createObjectURL(new Blob([editor.text()], { type: "text/yaml" })), download: file });
  link.click();
  URL.revokeObjectURL(link.href);
});

check();
