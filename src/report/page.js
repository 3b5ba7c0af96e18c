"use strict";
let charts = JSON.parse(document.getElementById("data").textContent);
const off = new Set();

const hideRuns = () => {
  for (const button of document.querySelectorAll("[data-toggle]")) {
    button.setAttribute("aria-pressed", String(!off.has(button.dataset.toggle)));
  }
  for (const part of document.querySelectorAll("[data-run]")) part.toggleAttribute("hidden", off.has(part.dataset.run));
  // Settings in which the runs that are left do not differ, and charts without a run, say nothing.
  for (const row of document.querySelectorAll("[data-settings] tbody tr")) {
    row.hidden = new Set([...row.querySelectorAll("td:not([hidden])")].map(cell => cell.textContent)).size < 2;
  }
  for (const chart of document.querySelectorAll("[data-chart]")) chart.hidden = !chart.querySelector(".line:not([hidden])");
};

// The button of a run hides everything of the run.
document.querySelector("nav").addEventListener("click", event => {
  const run = event.target.closest("[data-toggle]")?.dataset.toggle;
  if (run === undefined) return;
  if (!off.delete(run)) off.add(run);
  hideRuns();
});

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

// Returns the index of the step nearest to `step`. The steps are in ascending order.
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

// Shows the values under the pointer, or at the step that the arrow keys chose.
const startCharts = () => {
  for (const figure of document.querySelectorAll("[data-chart]")) startChart(figure);
};

const startChart = figure => {
  const { x, y, log, series } = charts[figure.dataset.chart];
  const svg = figure.querySelector("svg");
  const cells = [...figure.querySelectorAll(".readout > span")].map(span => [span.querySelector("b"), span.querySelector("small")]);
  const rest = cells.map(([value, where]) => [value.textContent, where.textContent]);
  const steps = [...new Set(series.flatMap(s => s.x))].sort((a, b) => a - b);
  let marks = null, at = null;

  const clear = () => {
    marks?.remove();
    marks = at = null;
    cells.forEach(([value, where], i) => [value.textContent, where.textContent] = rest[i]);
  };

  const mark = step => {
    clear();
    at = step;
    marks = draw("g", {}, svg);
    series.forEach((s, i) => {
      if (off.has(String(s.run))) return;
      const nth = nearest(s.x, step), value = s.y[nth], left = place(x, s.x[nth], false);
      const [cell, where] = cells[i];
      cell.textContent = show(value);
      where.textContent = `at ${s.x[nth]}`;
      draw("path", { class: "cursor", d: `M${left} ${y[3]}V${y[2]}` }, marks);
      if (typeof value === "number") draw("circle", { class: `spot r${s.run % 8}`, r: 3.4, cx: left, cy: place(y, value, log) }, marks);
    });
  };

  const point = event => {
    const matrix = svg.getScreenCTM();
    if (!matrix) return;
    const across = new DOMPoint(event.clientX, event.clientY).matrixTransform(matrix.inverse()).x;
    mark(x[0] + Math.min(1, Math.max(0, (across - x[2]) / (x[3] - x[2]))) * (x[1] - x[0]));
  };

  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", clear);
  svg.addEventListener("blur", clear);
  svg.addEventListener("keydown", event => {
    const last = steps.length - 1, now = at === null ? -1 : nearest(steps, at);
    const stride = event.shiftKey ? 10 : 1;
    const to = { ArrowRight: now + stride, ArrowLeft: now < 0 ? last : now - stride, Home: 0, End: last }[event.key];
    if (event.key === "Escape") clear();
    if (to === undefined || last < 0) return;
    event.preventDefault();
    mark(steps[Math.min(last, Math.max(0, to))]);
  });
};
startCharts();
