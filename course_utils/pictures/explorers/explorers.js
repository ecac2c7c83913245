// Sliders and lists, and what follows from them. Python computes all that is shown.

const STEP_MS = 1500; // time to look at a step while they are played

function render({ model, el }) {
  // Each explorer has a copy of this module, so counting would give equal ids.
  const view = Math.random().toString(36).slice(2);
  const summary = make("p", { role: "status" });
  const body = make("div", {
    className: "course-explorer-body",
    tabIndex: 0, // wide tables scroll: the keyboard must reach them, too
    role: "region",
    ariaLabel: model.get("region"),
  });
  const controls = model.get("controls").map(control);
  const explorer = make(
    "div",
    { className: "course-explorer" },
    make("div", { className: "course-explorer-controls" }, ...controls.map((c) => c.row)),
    summary,
    body,
  );
  shareKeys(explorer);
  el.append(explorer);

  function control({ name, label, options, values, check, play }) {
    const id = `course-explorer-${view}-${name}`;
    const slides = !options && !check;
    const input = options
      ? make("select", { id }, ...options.map((value) => make("option", { value }, value)))
      : make("input", { type: check ? "checkbox" : "range", id, step: 1 });
    // Not <output>: that is a live region, and the slider says its value by itself.
    const shown = make("span", { ariaHidden: "true" });
    input.addEventListener("input", () => {
      player?.stop();
      if (check) set(name, input.checked);
      else if (options) set(name, input.value);
      else set(name, values ? values[input.value] : Number(input.value));
      if (slides) show(model.get(name));
    });
    const player = play && makePlayer(name, input);
    const text = make("label", { htmlFor: id });
    const row = make("div", {}, text, input, shown, ...(play ? [player.button] : []));
    function show(value) {
      shown.textContent = value;
      // Else a screen reader would say the number of the stop, not what it stands for.
      if (values) input.setAttribute("aria-valuetext", value);
    }
    function refresh() {
      const now = model.get("controls").find((other) => other.name === name);
      const value = model.get(name);
      text.textContent = now.label;
      if (slides) {
        const ends = values ? { min: 0, max: values.length - 1 } : now;
        Object.assign(input, { min: ends.min, max: ends.max });
        show(value);
      }
      input.disabled = Boolean(now.disabled) || (slides && input.max === input.min);
      if (check) input.checked = value;
      else input.value = values ? nearest(values, value) : value;
      player?.refresh();
    }
    return { name, row, refresh, stop: () => player?.stop() };
  }

  // A button that moves a slider to its end; by one step at a time for those who have
  // asked their system for less motion.
  function makePlayer(name, input) {
    const button = make("button", { type: "button" });
    const less = matchMedia("(prefers-reduced-motion: reduce)");
    let timer = null;
    button.addEventListener("click", () => {
      if (timer !== null) return stop();
      if (atEnd()) set(name, Number(input.min));
      else advance();
      if (!less.matches && !atEnd()) timer = setInterval(advance, STEP_MS);
      refresh();
    });
    const atEnd = () => model.get(name) >= Number(input.max);
    function advance() {
      set(name, model.get(name) + 1);
      if (atEnd()) stop();
    }
    function stop() {
      clearInterval(timer);
      timer = null;
      refresh();
    }
    function refresh() {
      const play = less.matches ? "Next step" : "Play";
      const word = timer !== null ? "Pause" : atEnd() ? "From the start" : play;
      if (button.textContent !== word) button.textContent = word;
      button.disabled = input.disabled;
    }
    return { button, stop, refresh };
  }

  function set(name, value) {
    model.set(name, value);
    model.save_changes();
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
    for (const one of controls) one.stop();
    for (const name of names) model.off(`change:${name}`, refresh);
  };
}

function nearest(values, value) {
  const far = values.map((other) => Math.abs(other - value));
  return far.indexOf(Math.min(...far));
}

export default { render };
