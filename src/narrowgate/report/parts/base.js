// Elements, numbers and scales. Text goes in as text nodes only: nothing of a run is ever read as HTML.
const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== false));
  return element;
}
const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const shape = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const known = (value) => typeof value === "number" && Number.isFinite(value);
const percent = (share, digits = 1) => (known(share) ? `${(100 * share).toFixed(digits)}%` : "not known");
const whole = (value) => (known(value) ? Math.round(value).toLocaleString("en-GB") : "not known");
function short(value, digits = 3) {
  if (!known(value)) return "not known";
  const rounded = Number(value.toPrecision(digits)); // 999,999 is 1 M, not 1000 k
  for (const [size, unit] of [
    [1e9, " G"],
    [1e6, " M"],
    [1e3, " k"],
  ]) {
    if (Math.abs(rounded) >= size) return Number((value / size).toPrecision(digits)) + unit;
  }
  return String(rounded);
}
const count = (value) => (known(value) && value >= 1e6 ? short(value) : whole(value));
function time(seconds) {
  for (const [size, unit] of [
    [1, "s"],
    [1e-3, "ms"],
    [0, "µs"],
  ]) {
    if (seconds >= size) return `${Number((seconds / (size || 1e-6)).toPrecision(3))} ${unit}`;
  }
  return "not known";
}
function plain(value) {
  if (value === 0) return "0";
  return value >= 0.01 ? String(Number(value.toPrecision(2))) : value.toExponential(0).replace("e-", "e−");
}
const plural = (n, word) => `${whole(n)} ${word}${n === 1 ? "" : "s"}`;

// About so many round numbers between two numbers.
function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}
// Round numbers by factors: 1, 2 and 5 of each decade, or 1 alone where that is plenty.
function logTicks(low, high, wanted) {
  for (const digits of [[1, 2, 5], [1]]) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (const digit of digits) {
        const value = digit * 10 ** power;
        if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
      }
    }
    if (found.length <= wanted || digits.length === 1)
      return found.filter((_, i) => i % Math.ceil(found.length / wanted) === 0);
  }
}
function scale(axis, from, to) {
  const position = axis.log ? Math.log : (value) => value;
  const [low, high] = [position(axis.min), position(axis.max)];
  return (value) => from + ((position(value) - low) / (high - low || 1)) * (to - from);
}

// A drawing that follows the width of its place, so that letters keep their size on a phone.
function responsive(draw) {
  const host = el("div", { class: "chart" });
  let last = 0;
  const fit = () => {
    const width = Math.round(host.clientWidth);
    if (width && width !== last) draw(host, (last = width));
  };
  // Not at once: drawing changes the height, and the browser would complain of an observer that sets itself off.
  new ResizeObserver(() => requestAnimationFrame(fit)).observe(host);
  return { host, redraw: () => last && draw(host, last) };
}
// Call with the position inside an SVG whenever a mouse or a finger is over it.
function follow(svg, moved, gone) {
  for (const kind of ["pointermove", "pointerdown"]) {
    svg.addEventListener(kind, (event) => moved(event.clientX - svg.getBoundingClientRect().left));
  }
  svg.addEventListener("pointerleave", gone);
}
const legendItem = (colour, name, value = null) =>
  el("span", {}, el("i", { class: colour }), name, value && " ", value);
const section = (id, title, ...children) => el("section", { id }, el("h2", {}, title), ...children);
const note = (...children) => el("p", { class: "note" }, ...children);

function table(columns, rows) {
  const kind = (column) => (column.text ? { class: "text" } : {});
  const head = el(
    "tr",
    {},
    columns.map((column) => el("th", kind(column), column.name)),
  );
  const body = rows.map((row) =>
    el(
      "tr",
      {},
      row.map((cell, i) => el("td", kind(columns[i]), cell)),
    ),
  );
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, body)));
}
