// What the sliders of ipywidgets lack for a screen reader: names, and values in words.
// And the keys in a list are the list's: else JupyterLab would move between cells.

function render({ model, el }) {
  el.className += " course-explore-spoken";
  el.setAttribute("role", "status");
  const say = () => (el.textContent = model.get("text"));
  model.on("change:text", say);
  say();
  const waiting = setInterval(() => {
    const box = el.closest(".course-explore");
    if (!box) return; // the page gets all of it a moment later
    clearInterval(waiting);
    box.querySelectorAll(".widget-inline-hbox").forEach(name);
  }, 20);
  return () => clearInterval(waiting);
}

function name(row) {
  const label = row.querySelector(".widget-label").textContent;
  const input = row.querySelector("[role=slider], select");
  input?.setAttribute("aria-label", label);
  if (input?.matches("select")) input.dataset.lmSuppressShortcuts = "true";
  const value = row.querySelector(".widget-readout");
  if (!value) return;
  const say = () => input.setAttribute("aria-valuetext", value.textContent);
  new MutationObserver(say).observe(value, { childList: true, subtree: true });
  say();
}

export default { render };
