// The path of the rule on a function of two numbers, with its statistics, and a slider for each hyper-parameter.
import { ask, element, latest } from "./ask.js";
import { chart, short } from "./chart.js";

const $ = (id) => document.getElementById(id);

export function makePath(functions, shown) {
  // Values that the user chose, by name.
  let chosen = new Map();
  let sliders = "";

  $("function").append(...functions.map((name) => element("option", {}, name)));
  $("function").addEventListener("change", () => update());
  $("reset").addEventListener("click", () => {
    chosen = new Map();
    build();
    update();
  });

  const update = latest(async () => {
    const rule = shown();
    const body = { text: rule.text, function: $("function").value, hyper: Object.fromEntries(chosen) };
    const { answer, error } = await ask("path", body);
    $("path-problem").hidden = !error;
    $("path-problem").textContent = error ?? "";
    $("path-content").hidden = Boolean(error);
    if (!answer) return;
    $("picture").innerHTML = answer.picture; // of numbers alone
    $("caption").textContent = answer.caption;
    $("path-statistics").replaceChildren(...answer.statistics.map((line) => chart(line.label, { x: "step" }, [{ ...line, colour: 0 }], Infinity)));
    if (!chosen.size && answer.rate !== null) put("lr", answer.rate);
  });

  // Moves a slider to a value.
  function put(name, value) {
    const input = document.getElementById(`slider-${name}`);
    if (!input) return;
    const { values } = shown().sliders.find((slider) => slider.name === name);
    const places = values.map((_, i) => i);
    input.value = places.reduce((best, i) => (Math.abs(values[i] - value) < Math.abs(values[best] - value) ? i : best));
    write(input, values[input.value]);
  }

  function write(input, value) {
    input.setAttribute("aria-valuetext", short(value));
    input.nextElementSibling.textContent = short(value);
  }

  function build() {
    $("sliders").replaceChildren(...shown().sliders.map(({ name, values, at }) => {
      const input = element("input", { type: "range", id: `slider-${name}`, min: 0, max: values.length - 1, value: at });
      const row = element("div", { class: "slider" }, element("label", { for: input.id }, name), input, element("output", { for: input.id }));
      input.addEventListener("input", () => {
        if (!chosen.size && document.getElementById("slider-lr")) {
          const rates = shown().sliders.find((slider) => slider.name === "lr").values;
          chosen.set("lr", rates[document.getElementById("slider-lr").value]); // the rate that was the best one
        }
        chosen.set(name, values[input.value]);
        write(input, values[input.value]);
        update();
      });
      write(input, values[at]);
      return row;
    }));
  }

  // Of another rule, or one with other hyper-parameters; values that were chosen stay while the sliders do.
  function change() {
    const now = JSON.stringify(shown().sliders);
    if (now === sliders) return;
    sliders = now;
    chosen = new Map();
    build();
  }

  return { change, update };
}
