// What scrolls can be scrolled by the keyboard.
document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("pre, .table-wrapper, .picture")) {
    if (block.scrollWidth > block.clientWidth) block.tabIndex = 0;
  }
});
