// What the quizzes and the explorers have in common. It is put before their own code.

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
