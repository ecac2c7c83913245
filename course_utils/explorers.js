// Sliders and lists, and what follows from them. Python computes all that is shown.

let views = 0; // two views of one explorer need different ids

function render({ model, el }) {
  const view = ++views;
  const summary = make("p", { role: "status" });
  const body = make("div", {
    className: "course-explorer-body",
    tabIndex: 0, // wide tables scroll: the keyboard must reach them, too
    role: "region",
    ariaLabel: model.get("region"),
  });
  const controls = model.get("controls").map(control);
  el.append(
    make(
      "div",
      { className: "course-explorer" },
      make("div", { className: "course-explorer-controls" }, ...controls.map((c) => c.row)),
      summary,
      body,
    ),
  );

  function control({ name, label, options }) {
    const id = `course-explorer-${view}-${name}`;
    const input = options
      ? make("select", { id }, ...options.map((value) => make("option", { value }, value)))
      : make("input", { type: "range", id, step: 1 });
    // JupyterLab looks at the focused element: else arrow keys would move between cells.
    input.setAttribute("data-lm-suppress-shortcuts", "true");
    // Not <output>: that is a live region, and the slider says its value by itself.
    const shown = make("span", { ariaHidden: "true" });
    input.addEventListener("input", () => {
      if (!options) shown.textContent = input.value;
      model.set(name, options ? input.value : Number(input.value));
      model.save_changes();
    });
    const row = make("div", {}, make("label", { htmlFor: id }, label), input, shown);
    function refresh() {
      const now = model.get("controls").find((other) => other.name === name);
      if (!options) Object.assign(input, { min: now.min, max: now.max });
      input.disabled = Boolean(now.disabled) || (!options && input.max === input.min);
      input.value = model.get(name);
      if (!options) shown.textContent = model.get(name);
    }
    return { name, row, refresh };
  }

  function refresh() {
    for (const one of controls) one.refresh();
    // A live region speaks when it changes: not again for the same words.
    if (summary.textContent !== model.get("summary")) {
      summary.textContent = model.get("summary");
    }
    body.innerHTML = model.get("body"); // from Python, with nothing typed in it
  }

  const names = [...controls.map((c) => c.name), "controls", "summary", "body"];
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
