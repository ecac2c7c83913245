"use strict";
// What is below a slide's heading is made larger where there is room, for those in the
// last row, or smaller until it fits. Below the smallest factor nobody in a room could
// read it: then it scrolls.
const LARGEST = 1.2;
const SMALLEST = 0.55;
const MARGIN = 14; // pixels above the slide's number

function prepare(slide) {
  const box = document.createElement("div");
  box.className = "fits";
  for (const child of [...slide.children].slice(1))
    if (!child.matches("aside.notes")) box.append(child);
  slide.children[0].after(box);
}

function fit(slide) {
  const box = slide && slide.querySelector(":scope > .fits");
  if (!box || box.dataset.fitted || !slide.clientHeight) return;
  box.dataset.fitted = "yes";
  const head = slide.querySelector("h2");
  if (head) // a second line of it would take the room of the rest
    for (let size = 36; head.scrollHeight > 70 && size >= 26; size -= 2)
      head.style.fontSize = `${size}px`;
  const room = slide.clientHeight - box.offsetTop - MARGIN;
  // In lines of one height: grows where a line of code is broken in two.
  const code = (zoom) => [...box.querySelectorAll("pre")].reduce(
    (sum, one) => sum + one.getBoundingClientRect().height / zoom, 0);
  box.style.zoom = 1;
  const whole = code(1) + 1;
  const fits = (zoom) => {
    box.style.zoom = zoom;
    return box.getBoundingClientRect().height / Reveal.getScale() <= room
      && box.scrollWidth <= box.clientWidth + 1 && (zoom <= 1 || code(zoom) <= whole);
  };
  for (let step = LARGEST * 20; step >= SMALLEST * 20; step--)
    if (fits(step / 20)) return;
  box.style.height = `${room / SMALLEST}px`;
  box.style.zoom = SMALLEST;
  box.classList.add("scrolls");
  box.tabIndex = 0;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", "The rest of this slide: scroll");
}

// In a part that scrolls, these keys scroll; elsewhere they belong to reveal.js.
const SCROLLING = ["ArrowUp", "ArrowDown", "PageUp", "PageDown", "Home", "End"];
const isReveals = (event) =>
  !(event.target.matches?.(".scrolls") && SCROLLING.includes(event.key));

document.querySelectorAll(".slides section > section").forEach(prepare);
Reveal.on("ready", ({ currentSlide }) => fit(currentSlide));
Reveal.on("slidechanged", ({ currentSlide }) => fit(currentSlide));
Reveal.on("pdf-ready", () =>
  document.querySelectorAll(".slides section > section").forEach(fit));
Reveal.initialize({
  width: 1280,
  height: 720,
  margin: 0.04,
  center: false,
  hash: true,
  keyboardCondition: isReveals,
  slideNumber: "c/t",
  navigationMode: "linear", // the arrow keys pass through all slides, in order
  transition: "none",
  plugins: [RevealNotes],
});
