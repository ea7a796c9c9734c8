// The gallery: formulas are set, and cards are searched. It runs from disk, with no request to elsewhere.
for (const box of document.querySelectorAll(".rule-formula")) {
  katex.render(box.textContent, box, { displayMode: true, throwOnError: false });
}

const search = document.querySelector(".rule-search");

function within(range, text) {
  if (range === "") return true;
  const [low, high] = range.split(":").map(Number);
  return text !== "" && low <= Number(text) && Number(text) <= high;
}

function shown(card, fields) {
  const words = fields.words.value.toLowerCase().split(/\s+/);
  const text = `${card.dataset.words} ${card.dataset.year}`;
  return words.every((word) => text.includes(word))
    && (fields.family.value === "" || fields.family.value === card.dataset.family)
    && within(fields.year.value, card.dataset.year)
    && within(fields.bytes.value, card.dataset.bytes);
}

const orders = {
  name: (a, b) => a.dataset.name.localeCompare(b.dataset.name),
  year: (a, b) => Number(b.dataset.year) - Number(a.dataset.year) || orders.name(a, b),
  bytes: (a, b) => Number(a.dataset.bytes) - Number(b.dataset.bytes) || orders.name(a, b),
};

function refresh() {
  const box = document.querySelector(".rule-cards");
  const fields = search.elements;
  let count = 0;
  for (const card of [...box.children].sort(orders[fields.order.value])) {
    card.hidden = !shown(card, fields);
    count += card.hidden ? 0 : 1;
    box.append(card);
  }
  search.querySelector("output").textContent = `${count} rule${count === 1 ? "" : "s"}`;
}

if (search) {
  search.addEventListener("input", refresh);
  search.addEventListener("submit", (event) => event.preventDefault());
  refresh();
}
