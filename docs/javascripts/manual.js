// Keys reach everything that scrolls, the search has a name, and parts of a table of contents
// and the buttons of a block of code are no landmarks.
// A table that is wider than its column shows each row as a list.
// It runs from disk, with no request to elsewhere.
function makeReachable() {
  for (const box of document.querySelectorAll(".md-typeset pre > code, .md-typeset__scrollwrap, .rule-formula")) {
    if (box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
  for (const buttons of document.querySelectorAll("nav.md-code__nav")) buttons.setAttribute("role", "presentation");
}

// Each cell knows the head of its column. A table is measured as it would be with columns.
function stackTables() {
  for (const table of document.querySelectorAll(".md-typeset__table > table:not(.bars)")) {
    const heads = [...table.querySelectorAll("thead tr:last-child > *")].map((head) => head.textContent.trim());
    for (const row of table.tBodies[0]?.rows ?? [])
      [...row.cells].forEach((cell, column) => (cell.dataset.head = heads[column] ?? ""));
    const box = table.closest(".md-typeset__scrollwrap");
    table.removeAttribute("data-stacked");
    table.toggleAttribute("data-stacked", box.clientWidth > 0 && box.scrollWidth > box.clientWidth + 1);
  }
}

for (const box of document.querySelectorAll(".md-search, .md-search__inner")) {
  box.setAttribute("aria-label", "Search the manual");
}

for (const part of document.querySelectorAll(".md-nav--secondary nav.md-nav")) {
  part.setAttribute("role", "presentation");
  part.removeAttribute("aria-label");
}
document.querySelector("nav.md-path")?.setAttribute("aria-label", "Path of this page");

let waiting = 0;
function soon() {
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(() => {
    stackTables();
    makeReachable();
    window.manual_is_set = true;
  });
}

new MutationObserver(soon).observe(document.body, { childList: true, subtree: true });
addEventListener("resize", soon);
document.addEventListener("toggle", soon, true); // a table in a closed block has no width
soon();
