// A race of the rule with some of the library: a table and two plots.
import { ask, element, table } from "./ask.js";
import { chart } from "./chart.js";

const $ = (id) => document.getElementById(id);
const RIVALS = { adamw: true, sgd: true, lion: false, muon: false };

export function makeRace(tasks, shown) {
  let stop = null;
  $("task").append(...tasks.map((name) => element("option", {}, name)));
  for (const [name, checked] of Object.entries(RIVALS)) {
    $("rivals").append(element("label", {}, element("input", { type: "checkbox", value: name, checked }), element("span", {}, name)));
  }
  $("race-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    if (stop) stop.abort();
    else if (shown()) await run();
  });

  async function run() {
    const rivals = [...document.querySelectorAll("#rivals input:checked")].map((input) => input.value);
    if ($("rival").value.trim()) rivals.push($("rival").value.trim());
    stop = new AbortController();
    $("go").textContent = "Stop";
    $("race-problem").hidden = true;
    const bar = $("race-progress");
    bar.hidden = false;
    bar.removeAttribute("value");
    const { answer, error } = await ask("race", { text: shown().text, task: $("task").value, rivals }, {
      signal: stop.signal, progress: (part) => { bar.value = part; },
    });
    stop = null;
    $("go").textContent = "Race";
    bar.hidden = true;
    $("race-problem").hidden = !error;
    $("race-problem").textContent = error ?? "";
    if (answer) draw(answer);
  }

  function draw({ title, columns, rows, notes, curves, rates }) {
    // A rule has one colour in the table and both plots, however the race ends.
    const labels = curves.map((curve) => curve.label).sort((a, b) => (b === "your rule") - (a === "your rule"));
    const colour = (label) => labels.indexOf(label);
    const coloured = (series) => series.map((each) => ({ ...each, colour: colour(each.label) }));
    const first = curves.map((curve) => curve.mean[0]).find((value) => value != null) ?? Infinity;
    const ceiling = first * 10;
    const marked = rows.map(([label, ...cells]) => [element("span", { class: `key colour${colour(label)}` }, label), ...cells]);
    $("race-result").replaceChildren(
      element("p", { role: "status" }, title), table(marked, columns), ...notes.map((note) => element("p", { class: "about" }, note)),
      chart("Training loss at the best learning rate", { x: "step" }, coloured(curves), ceiling),
      chart("Final loss at each learning rate; a gap: runs diverged", { x: "learning rate", logarithmic: true }, coloured(rates), ceiling),
    );
  }
}
