// One quiz question as a form. Python judges the answers; this file only shows.
//
// question  {id, kind: "single" | "multiple" | "number", task, prompt, code,
//            options: [HTML], unit, label, purpose, button (what the button does)}
// feedback  {} or {serial, given: [option numbers from 1, or a text], state: "noted" |
//            "right" | "wrong", word, text, notes: [{option from 0, good, word, text}],
//            trouble}
// score     one line about the lesson, or ""
//
// prompt, options, purpose and the text of a feedback are HTML, which Python has escaped.

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

  const button = make("button", { type: "submit" }, question.button);
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
        make("span", { className: "course-quiz-prompt", innerHTML: question.prompt }),
      ),
      question.code && make("pre", {}, make("code", {}, question.code)),
      ...(isNumber ? [number.row] : options.map((one) => one.row)),
    ),
    make("div", { className: "course-quiz-actions" }, button, score),
    verdict,
  );
  shareKeys(form);

  let patience; // the timer that runs while Python judges

  function say(state, ...content) {
    clearTimeout(patience);
    verdict.dataset.state = state;
    verdict.replaceChildren(...content);
  }

  function forget() {
    say("none");
    for (const one of options) one.note({ word: "", good: null });
  }

  function showFeedback() {
    const feedback = model.get("feedback");
    forget();
    if (feedback.serial === undefined) {
      for (const one of inputs) isNumber ? (one.value = "") : (one.checked = false);
      return;
    }
    if (isNumber) {
      number.input.value = feedback.given[0];
    } else {
      options.forEach((one, i) => {
        one.input.checked = feedback.given.includes(i + 1);
      });
    }
    for (const note of feedback.notes) options[note.option].note(note);
    say(
      feedback.state,
      make("p", {}, ...said(feedback)),
      feedback.trouble && make("p", {}, feedback.trouble),
    );
  }

  function showScore() {
    score.textContent = model.get("score");
  }

  form.addEventListener("input", forget); // what it says is about the answer before

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
    make("label", { htmlFor: id }, input, make("span", { innerHTML: text })),
    noteElement,
  );
  function note(one) {
    noteElement.replaceChildren(...(one.word ? said(one) : []));
    noteElement.dataset.state =
      one.good === false ? "wrong" : one.good ? "right" : "none";
    // Read out with the option; an empty note would be a description that says nothing.
    if (one.word) input.setAttribute("aria-describedby", noteElement.id);
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
  const what = question.unit === "times" ? "how many times" : question.unit;
  const unit = what ? ` (${what})` : "";
  const row = make(
    "div",
    { className: "course-quiz-number" },
    make("label", { htmlFor: name }, `${question.label}${unit}`),
    input,
  );
  if (question.purpose) {
    const purpose = make("p", {
      id: `${name}-purpose`,
      innerHTML: question.purpose,
    });
    input.setAttribute("aria-describedby", purpose.id);
    row.append(purpose);
  }
  return { input, row };
}

function said({ word, text }) {
  return [make("strong", {}, word), " ", make("span", { innerHTML: text })];
}

function make(tag, properties, ...children) {
  const { role, ...others } = properties;
  const element = Object.assign(document.createElement(tag), others);
  if (role) element.setAttribute("role", role);
  element.append(...children.filter((child) => child));
  return element;
}

// Plain keys are the form's: else JupyterLab would move between cells, or delete one.
// Escape, and Enter with Shift, Ctrl, Alt or Meta, lead back to the notebook, whose
// keys these are. So are the other ones with Ctrl, Alt or Meta, such as Ctrl + S.
function shareKeys(form) {
  form.addEventListener("keydown", (event) => {
    const held = event.ctrlKey || event.altKey || event.metaKey;
    const leaves =
      event.key === "Escape" || (event.key === "Enter" && (event.shiftKey || held));
    if (leaves) form.closest(".jp-Cell")?.focus({ preventScroll: true });
    else if (!held) event.stopPropagation();
  });
}

export default { render };
