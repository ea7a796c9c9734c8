// Keys reach everything that scrolls, the search has a name, and the buttons of a block of code are no landmark.
// It runs from disk, with no request to elsewhere.
function makeReachable() {
  for (const box of document.querySelectorAll(".md-typeset pre > code, .md-typeset__scrollwrap, .rule-formula")) {
    if (box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
  for (const buttons of document.querySelectorAll("nav.md-code__nav")) buttons.setAttribute("role", "presentation");
}

for (const box of document.querySelectorAll(".md-search, .md-search__inner")) {
  box.setAttribute("aria-label", "Search the manual");
}

let waiting = 0;
function soon() {
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(makeReachable);
}

new MutationObserver(soon).observe(document.body, { childList: true, subtree: true });
addEventListener("resize", soon);
soon();
