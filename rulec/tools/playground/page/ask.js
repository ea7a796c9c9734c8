// Questions to the server, and small helpers.

import { keyOf } from "./link.js";

// The key that the address has behind #; for a link without one, that of the last address which had one.
export const key = keyOf(location.hash) ?? localStorage.getItem("key") ?? "";
if (key) localStorage.setItem("key", key);
const KEY = { "X-Rulec-Key": key };

// Gets something of the server.
export const get = (path) => fetch(path, { headers: KEY });

// Asks; returns {answer} or {error}. Lines with progress come before.
export async function ask(question, body, { signal, progress } = {}) {
  let response;
  try {
    response = await fetch(`ask/${question}`, {
      method: "POST", body: JSON.stringify(body), signal, headers: { ...KEY, "Content-Type": "application/json" },
    });
    if (!response.ok) return { error: await response.text() };
    let last = { error: "The server gave no answer." };
    for await (const line of lines(response.body)) {
      last = JSON.parse(line);
      if ("progress" in last) progress?.(last.progress);
    }
    return last;
  } catch (error) {
    if (error.name === "AbortError") return { error: "Stopped." };
    return { error: "The server does not answer: start rulec play again." };
  }
}

async function* lines(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    yield* parts;
  }
  if (rest) yield rest;
}

// A function that runs one call at a time; of the calls that come meanwhile, the last one alone.
export function latest(work) {
  let running = false, next = null;
  return async (...args) => {
    next = args;
    if (running) return;
    running = true;
    try {
      while (next) {
        const now = next;
        next = null;
        await work(...now);
      }
    } finally {
      running = false;
    }
  };
}

// An element with attributes and children.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// Text with `code` and **names** as elements.
export const marked = (text) => text.split(/(`[^`]*`|\*\*[^*]*\*\*)/).map((piece) =>
  piece.startsWith("`") ? element("code", {}, piece.slice(1, -1))
    : piece.startsWith("**") ? element("b", {}, piece.slice(2, -2)) : piece);

// A table of rows; the first cell of each is its head. A row without a head goes on with the row before.
export function table(rows, head) {
  const body = [];
  for (const [first, ...others] of rows) {
    if (first === "") body.at(-1).lastChild.append(element("div", { class: "more" }, ...others));
    else body.push(element("tr", {}, element("th", { scope: "row" }, first), ...others.map((cell) => element("td", {}, cell))));
  }
  const top = head ? [element("thead", {}, element("tr", {}, ...head.map((c) => element("th", { scope: "col" }, c))))] : [];
  return element("div", { class: "wide", tabindex: "0", role: "group" }, element("table", {}, ...top, element("tbody", {}, ...body)));
}
