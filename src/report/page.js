"use strict";
const charts = JSON.parse(document.getElementById("data").textContent);
const off = new Set();

// A run's button hides everything that belongs to the run.
for (const button of document.querySelectorAll("[data-toggle]")) {
  button.addEventListener("click", () => {
    const run = button.dataset.toggle;
    const hide = !off.delete(run);
    if (hide) off.add(run);
    button.setAttribute("aria-pressed", String(!hide));
    for (const part of document.querySelectorAll(`[data-run="${run}"]`)) part.toggleAttribute("hidden", hide);
  });
}

const place = ([low, high, from, to], value, log) => {
  const scale = v => (log ? Math.log10(v) : v);
  return from + (scale(value) - scale(low)) / (scale(high) - scale(low)) * (to - from);
};

const show = value => {
  if (typeof value !== "number") return value;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(3).replace(/\.?0+e\+?/, "e");
  return value.toLocaleString("en", { maximumSignificantDigits: 5 });
};

// Index of the step nearest to `step`; steps ascend.
const nearest = (steps, step) => {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - steps[low - 1] <= steps[low] - step ? low - 1 : low;
};

const draw = (name, attributes, parent) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  return parent.appendChild(node);
};

for (const figure of document.querySelectorAll("[data-chart]")) {
  const { x, y, log, series } = charts[figure.dataset.chart];
  const svg = figure.querySelector("svg");
  const cells = [...figure.querySelectorAll(".readout > span")].map(span => [span.querySelector("b"), span.querySelector("small")]);
  const rest = cells.map(([value, where]) => [value.textContent, where.textContent]);
  let marks = null;

  const clear = () => {
    marks?.remove();
    marks = null;
    cells.forEach(([value, where], i) => [value.textContent, where.textContent] = rest[i]);
  };

  const point = event => {
    const matrix = svg.getScreenCTM();
    if (!matrix) return;
    const across = new DOMPoint(event.clientX, event.clientY).matrixTransform(matrix.inverse()).x;
    const step = x[0] + Math.min(1, Math.max(0, (across - x[2]) / (x[3] - x[2]))) * (x[1] - x[0]);
    clear();
    marks = draw("g", {}, svg);
    series.forEach((s, i) => {
      if (off.has(String(s.run))) return;
      const at = nearest(s.x, step), value = s.y[at], left = place(x, s.x[at], false);
      const [cell, where] = cells[i];
      cell.textContent = show(value);
      where.textContent = `at ${s.x[at]}`;
      draw("path", { class: "cursor", d: `M${left} ${y[3]}V${y[2]}` }, marks);
      if (typeof value === "number") draw("circle", { class: `spot r${s.run % 8}`, r: 3.4, cx: left, cy: place(y, value, log) }, marks);
    });
  };

  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", clear);
}
