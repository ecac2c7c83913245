// Three sliders and what follows from them. Python computes `summary` and `body`.

let views = 0; // two views of one explorer need different ids

function render({ model, el }) {
  const view = ++views;
  const summary = make("p", { role: "status" });
  const body = make("div", {
    className: "course-explorer-body",
    tabIndex: 0, // wide tables scroll: the keyboard must reach them, too
    role: "region",
    ariaLabel: "Table of ranks and commands",
  });
  const sliders = [
    slider("nodes", "Nodes", 1, () => model.get("most")),
    slider("gpus_per_node", "GPUs on each node", 1, () => model.get("most")),
    slider("rank", "Rank to point out", 0, () =>
      model.get("nodes") * model.get("gpus_per_node") - 1),
  ];
  el.append(
    make(
      "div",
      { className: "course-explorer" },
      make("div", { className: "course-explorer-sliders" }, ...sliders.map((s) => s.row)),
      summary,
      body,
    ),
  );

  function slider(name, label, min, max) {
    const id = `course-explorer-${view}-${name}`;
    const input = make("input", { type: "range", id, min, step: 1 });
    // JupyterLab looks at the focused element: else arrow keys would move between cells.
    input.setAttribute("data-lm-suppress-shortcuts", "true");
    // Not <output>: that is a live region, and the slider says its value by itself.
    const shown = make("span", { ariaHidden: "true" });
    input.addEventListener("input", () => {
      shown.textContent = input.value;
      model.set(name, Number(input.value));
      model.save_changes();
    });
    const row = make("div", {}, make("label", { htmlFor: id }, label), input, shown);
    function refresh() {
      input.max = max();
      input.disabled = input.max === input.min;
      input.value = model.get(name);
      shown.textContent = model.get(name);
    }
    return { row, refresh };
  }

  function refresh() {
    for (const one of sliders) one.refresh();
    // A live region speaks when it changes: not again for the same words.
    if (summary.textContent !== model.get("summary")) {
      summary.textContent = model.get("summary");
    }
    body.innerHTML = model.get("body"); // from Python, with nothing typed in it
  }

  const names = ["nodes", "gpus_per_node", "rank", "summary", "body"];
  for (const name of names) model.on(`change:${name}`, refresh);
  refresh();
  return () => {
    for (const name of names) model.off(`change:${name}`, refresh);
  };
}

function make(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "role") element.setAttribute("role", value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

export default { render };
