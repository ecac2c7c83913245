// One quiz question as a form. Python judges the answers; this file only shows.
//
// question  {id, kind: "single" | "multiple" | "number", task, prompt, code,
//            options: [text], unit, purpose, measured (it is noted, then measured)}
// feedback  {} or {serial, given: [option numbers from 1, or a text], right, noted (not
//            judged yet), word, text, notes: [{option from 0, good, word, text}],
//            trouble}
// score     one line about the lesson, or ""

// How long Python may take before the learner is told why nothing happens.
const PATIENCE_MS = 3000;
const NO_REPLY =
  "Python has not replied yet. If a cell is running, your answer is checked when it " +
  "ends. If none is, run this cell again.";
const KERNEL_GONE =
  "The kernel was restarted. Run this cell again: your saved answers come back.";

let views = 0; // inputs of two views of one question need different names and ids

function render({ model, el }) {
  const question = model.get("question");
  const name = `course-quiz-${question.id}-${++views}`;
  const isNumber = question.kind === "number";
  const options = question.options.map((text, i) => option(question, name, text, i));
  const number = isNumber ? numberField(question, name) : null;
  const inputs = isNumber ? [number.input] : options.map((one) => one.input);

  const firstStep = question.measured ? "Note it" : "Check";
  const button = make("button", { type: "submit" }, firstStep);
  const score = make("span", { className: "course-quiz-score" });
  const verdict = make("div", { className: "course-quiz-verdict", role: "status" });
  const form = make(
    "form",
    { className: "course-quiz", noValidate: true },
    make(
      "fieldset",
      {},
      make(
        "legend",
        {},
        make("span", { className: "course-quiz-task" }, question.task),
        make("span", { className: "course-quiz-prompt" }, ...prose(question.prompt)),
      ),
      question.code && make("pre", {}, make("code", {}, question.code)),
      ...(isNumber ? [number.row] : options.map((one) => one.row)),
    ),
    make("div", { className: "course-quiz-actions" }, button, score),
    verdict,
  );
  // JupyterLab looks at the focused element only: on the form it would not help, and
  // arrow keys, Enter or "dd" would act on the notebook's cells.
  for (const one of [...inputs, button]) {
    one.setAttribute("data-lm-suppress-shortcuts", "true");
  }

  let patience; // the timer that runs while Python judges

  function say(state, ...content) {
    clearTimeout(patience);
    verdict.dataset.state = state;
    verdict.replaceChildren(...content);
  }

  function forget() {
    say("none");
    for (const one of options) one.note("", null);
  }

  function showFeedback() {
    const feedback = model.get("feedback");
    forget();
    if (feedback.serial === undefined) {
      for (const one of inputs) isNumber ? (one.value = "") : (one.checked = false);
      button.textContent = firstStep;
      return;
    }
    if (isNumber) {
      number.input.value = feedback.given[0];
    } else {
      options.forEach((one, i) => {
        one.input.checked = feedback.given.includes(i + 1);
      });
    }
    for (const { option, good, word, text } of feedback.notes) {
      options[option].note(word, text, good);
    }
    say(
      feedback.noted ? "noted" : feedback.right ? "right" : "wrong",
      make("p", {}, make("strong", {}, feedback.word), " ", ...prose(feedback.text)),
      feedback.trouble && make("p", {}, feedback.trouble),
    );
    button.textContent = nextStep(feedback);
  }

  function nextStep(feedback) {
    if (feedback.noted) return "Explain";
    return feedback.right ? "Check again" : "Try again";
  }

  function showScore() {
    score.textContent = model.get("score");
  }

  // A browser submits on Enter by itself, but the notebook cancels the line break that
  // Enter in a text field begins with, and so the submit.
  number?.input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });

  form.addEventListener("input", () => {
    forget(); // what it says is about the answer before
    button.textContent = firstStep;
  });

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const ticked = options.flatMap((one, i) => (one.input.checked ? [i + 1] : []));
    clearTimeout(patience);
    patience = setTimeout(() => showTrouble({ trouble: NO_REPLY }), PATIENCE_MS);
    try {
      model.send({ answer: isNumber ? number.input.value : ticked });
    } catch {
      showTrouble({ trouble: KERNEL_GONE });
    }
  });

  function showTrouble({ trouble }) {
    say("trouble", make("p", {}, trouble));
  }

  model.on("change:feedback", showFeedback);
  model.on("change:score", showScore);
  model.on("msg:custom", showTrouble);
  showFeedback();
  showScore();
  el.replaceChildren(form);
  return () => {
    clearTimeout(patience);
    model.off("change:feedback", showFeedback);
    model.off("change:score", showScore);
    model.off("msg:custom", showTrouble);
  };
}

// A radio button or a checkbox with its label, and room for a note under it.
function option(question, name, text, i) {
  const id = `${name}-${i}`;
  const type = question.kind === "single" ? "radio" : "checkbox";
  const input = make("input", { type, name, id });
  const noteElement = make("p", { className: "course-quiz-note", id: `${id}-note` });
  const row = make(
    "div",
    { className: "course-quiz-option" },
    make("label", { htmlFor: id }, input, make("span", {}, ...prose(text))),
    noteElement,
  );
  function note(word, text, good) {
    const said = word ? [make("strong", {}, word), " ", ...prose(text)] : [];
    noteElement.replaceChildren(...said);
    noteElement.dataset.state = good === false ? "wrong" : good ? "right" : "none";
    // Read out with the option; an empty note would be a description that says nothing.
    if (word) input.setAttribute("aria-describedby", noteElement.id);
    else input.removeAttribute("aria-describedby");
  }
  return { input, row, note };
}

// type="text" and not "number": that one refuses "1,5" in some languages and "1.5 GB"
// in all, and its arrow keys change the number.
function numberField(question, name) {
  const input = make("input", {
    type: "text",
    inputMode: "decimal",
    autocomplete: "off",
    spellcheck: false,
    id: name,
  });
  const unit = question.unit ? ` in ${question.unit}` : "";
  const row = make(
    "div",
    { className: "course-quiz-number" },
    make("label", { htmlFor: name }, `Your prediction${unit}`),
    input,
  );
  if (question.purpose) {
    const purpose = make("p", { id: `${name}-purpose` }, ...prose(question.purpose));
    input.setAttribute("aria-describedby", purpose.id);
    row.append(purpose);
  }
  return { input, row };
}

// Text with `code` between backticks, as nodes: no HTML is ever parsed.
function prose(text) {
  return text
    .split("`")
    .map((part, i) => (i % 2 ? make("code", {}, part) : document.createTextNode(part)));
}

function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children.filter((child) => child));
  return element;
}

export default { render };
