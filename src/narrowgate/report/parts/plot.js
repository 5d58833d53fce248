// Lines over one axis. The legend shows the numbers at the cursor, or the last ones: nothing floats over the lines.
const MARGIN = { left: 52, right: 14, top: 12, bottom: 38 };

function axes(width, height, x, y) {
  const px = scale(x, MARGIN.left, width - MARGIN.right);
  const py = scale(y, height - MARGIN.bottom, MARGIN.top);
  const svg = shape("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  const bottom = height - MARGIN.bottom;
  for (const value of y.ticks ?? ticks(y.min, y.max, height / 40)) {
    svg.append(
      shape("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: py(value), y2: py(value) }),
      shape("text", { x: MARGIN.left - 6, y: py(value) + 4, "text-anchor": "end" }, y.format(value)),
    );
  }
  const wanted = Math.max(2, Math.floor(width / 75));
  for (const value of x.ticks?.(wanted) ?? (x.log ? logTicks : ticks)(x.min, x.max, wanted)) {
    svg.append(
      shape("line", { class: "axis", x1: px(value), x2: px(value), y1: bottom, y2: bottom + 4 }),
      shape("text", { x: px(value), y: bottom + 17, "text-anchor": "middle" }, x.format(value)),
    );
  }
  svg.append(
    shape("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom }),
    shape("text", { x: width - MARGIN.right, y: height - 4, "text-anchor": "end" }, x.label),
  );
  return { svg, px, py };
}

function path(points, px, py, step) {
  let text = "";
  let before = null;
  for (const [x, y] of points) {
    const [h, v] = [px(x).toFixed(1), py(y).toFixed(1)];
    text += before === null ? `M${h} ${v}` : step ? `H${h}V${v}` : `L${h} ${v}`;
    before = y;
  }
  return text;
}

// spec: title, x, y, lines [{name, colour, points, step, format}], marks [{x, text}], at (x) -> text
function plot(spec) {
  const lines = spec.lines.map((line) => ({ ...line, points: line.points.filter(([x, y]) => known(x) && known(y)) }));
  const stops = [...new Set(lines.flatMap((line) => line.points.map(([x]) => x)))].sort((a, b) => a - b);
  const at = el("span", { class: "at" });
  const values = lines.map(() => el("b"));
  const event = el("span", { class: "event" });
  const legend = el(
    "div",
    { class: "legend" },
    at,
    lines.map((line, i) => legendItem(line.colour, line.name, values[i])),
  );
  if (spec.marks?.length) legend.append(event);
  const show = (stop) => {
    at.textContent = spec.at(stop);
    lines.forEach((line, i) => {
      const point = line.points.filter(([x]) => x <= stop).at(-1);
      values[i].textContent = point ? (line.format ?? spec.y.format)(point[1]) : "–";
    });
    event.textContent = (spec.marks ?? [])
      .filter((mark) => mark.x === stop)
      .map((mark) => mark.text)
      .join("; ");
  };
  const drawing = responsive((host, width) => {
    const height = Math.min(spec.height ?? 240, Math.max(170, width * 0.6));
    const { svg, px, py } = axes(width, height, spec.x, spec.y);
    svg.setAttribute("aria-label", spec.title);
    for (const mark of spec.marks ?? []) {
      const x = px(mark.x);
      svg.append(
        shape("line", { class: "mark", x1: x, x2: x, y1: MARGIN.top, y2: height - MARGIN.bottom }),
        shape("path", { class: "tip", d: `M${x - 5} ${MARGIN.top - 8}h10l-5 8z` }, shape("title", {}, mark.text)),
      );
    }
    for (const line of lines) {
      svg.append(shape("path", { class: `line ${line.colour}`, d: path(line.points, px, py, line.step) }));
      for (const [x, y] of line.points.length < 2 || line.dots ? line.points : []) {
        svg.append(shape("circle", { class: `fill ${line.colour}`, cx: px(x), cy: py(y), r: 3 }));
      }
    }
    const cursor = shape("line", { class: "cursor", y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden" });
    svg.append(cursor);
    const moved = (position) => {
      const nearest = stops.reduce((a, b) => (Math.abs(px(b) - position) < Math.abs(px(a) - position) ? b : a));
      for (const key of ["x1", "x2"]) cursor.setAttribute(key, px(nearest));
      cursor.setAttribute("visibility", "visible");
      show(nearest);
    };
    follow(svg, moved, () => {
      cursor.setAttribute("visibility", "hidden");
      show(stops.at(-1));
    });
    host.replaceChildren(svg);
  });
  if (!stops.length) return [note("No numbers yet.")];
  show(stops.at(-1));
  return [legend, drawing.host];
}
