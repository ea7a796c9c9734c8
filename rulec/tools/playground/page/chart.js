// Lines over an axis, with a band from the lowest to the highest value; redrawn where its width changes.

const NS = "http://www.w3.org/2000/svg";
const HEIGHT = 300, LEFT = 58, RIGHT = 12, TOP = 10, BOTTOM = 42;

function node(tag, attributes, text) {
  const made = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

export function chart(title, axes, series, ceiling) {
  const figure = document.createElement("figure");
  figure.className = "chart";
  const caption = document.createElement("figcaption");
  caption.textContent = title;
  const box = document.createElement("div");
  figure.append(caption, box);
  new ResizeObserver(() => {
    const width = Math.floor(box.clientWidth);
    if (width > 0 && box.dataset.width !== String(width)) {
      box.dataset.width = width;
      box.replaceChildren(drawn(width, title, axes, series, ceiling));
    }
  }).observe(box);
  return figure;
}

function drawn(width, title, axes, series, ceiling) {
  const svg = node("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": title });
  const values = series.flatMap((s) => [...s.low, ...s.high]).filter((v) => v !== null && v <= ceiling);
  const logarithmic = values.length > 0 && values.every((v) => v > 0);
  const x = scale(series.flatMap((s) => s.x), axes.logarithmic, LEFT, width - RIGHT);
  const y = scale(values, logarithmic, HEIGHT - BOTTOM, TOP);
  for (const tick of y.ticks) {
    svg.append(node("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y.at(tick), y2: y.at(tick) }));
    svg.append(node("text", { class: "tick", x: LEFT - 6, y: y.at(tick) + 4, "text-anchor": "end" }, short(tick)));
  }
  for (const tick of x.ticks) {
    const anchor = x.at(tick) > width - RIGHT - 14 ? "end" : "middle";
    svg.append(node("text", { class: "tick", x: x.at(tick), y: HEIGHT - BOTTOM + 18, "text-anchor": anchor }, short(tick)));
  }
  svg.append(node("text", { class: "tick", x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, axes.x));
  const clip = `clip-${Math.random().toString(36).slice(2)}`;
  const region = node("clipPath", { id: clip });
  region.append(node("rect", { x: LEFT - 4, y: TOP, width: width - LEFT - RIGHT + 8, height: HEIGHT - TOP - BOTTOM + 4 }));
  const inner = node("g", { "clip-path": `url(#${clip})` });
  svg.append(region, inner);
  for (const s of series) {
    for (const part of stretches(s)) {
      const top = part.map((i) => `${x.at(s.x[i])},${y.at(s.high[i])}`);
      const under = part.map((i) => `${x.at(s.x[i])},${y.at(s.low[i])}`).reverse();
      inner.append(node("polygon", { class: `band colour${s.colour}`, points: [...top, ...under].join(" ") }));
      const line = part.map((i) => `${x.at(s.x[i])},${y.at(s.mean[i])}`).join(" ");
      inner.append(node("polyline", { class: `line colour${s.colour}`, points: line }));
      if (s.x.length <= 20) {
        for (const i of part) inner.append(node("circle", { class: `dot colour${s.colour}`, cx: x.at(s.x[i]), cy: y.at(s.mean[i]), r: 3 }));
      }
    }
  }
  return svg;
}

// The stretches of places whose runs are all finite.
function stretches(series) {
  const parts = [[]];
  series.mean.forEach((value, i) => {
    if (value === null) parts.push([]);
    else parts.at(-1).push(i);
  });
  return parts.filter((part) => part.length);
}

function scale(values, logarithmic, from, to) {
  const f = logarithmic ? (v) => Math.log10(Math.max(v, 1e-300)) : (v) => v;
  let low = Math.min(...values.map(f)), high = Math.max(...values.map(f));
  if (!Number.isFinite(low)) [low, high] = [0, 1];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const at = (v) => from + ((f(v) - low) / (high - low)) * (to - from);
  return { at: (v) => Math.round(at(v) * 10) / 10, ticks: logarithmic ? decades(low, high) : even(low, high) };
}

function decades(low, high) {
  const step = Math.max(1, Math.ceil((high - low) / 6));
  const ticks = [];
  for (let power = Math.floor(low); power <= high; power += 1) {
    for (const digit of high - low < 1.5 ? [1, 2, 5] : [1]) {
      const place = power + Math.log10(digit);
      if (place >= low - 1e-9 && place <= high + 1e-9 && power % step === 0) ticks.push(digit * 10 ** power);
    }
  }
  return ticks;
}

function even(low, high) {
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((d) => d * power).find((s) => s >= rough);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-9); k += 1) ticks.push(k * step);
  return ticks;
}

export function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e4 || size < 1e-3) return value.toExponential().replace(/\.?0*e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}
