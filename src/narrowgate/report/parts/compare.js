// Several runs: a table to sort, and accuracy against size with the front that no other run beats.
const ALL_COLUMNS = [
  { name: "Run", key: (run) => run.name, text: true },
  { name: "Accuracy", key: (run) => run.after.accuracy, show: (value) => percent(value, 2) },
  { name: "Parameters", key: (run) => run.after.parameters, show: count },
  { name: "Parameters left", key: (run) => run.after.parameters / run.before.parameters, show: percent },
  { name: "Multiply-adds", key: (run) => run.after.multiply_adds, show: count },
  { name: "Multiply-adds left", key: (run) => run.after.multiply_adds / run.before.multiply_adds, show: percent },
  { name: "Network", key: (run) => run.network, text: true, optional: true },
  { name: "Data", key: (run) => run.data, text: true, optional: true },
  { name: "Method", key: (run) => run.method, text: true },
];

function compareTable(runs, open) {
  const differ = (column) => !column.optional || new Set(runs.map(column.key)).size > 1;
  const columns = ALL_COLUMNS.filter(differ);
  const body = el("tbody");
  const heads = columns.map((column, i) =>
    el("th", column.text ? { class: "text" } : {}, el("button", { onclick: () => sort(i) }, column.name)),
  );
  const rows = runs.map((run, i) =>
    el(
      "tr",
      { "data-run": i },
      columns.map((column, j) => {
        const value = column.key(run);
        const text = column.show ? column.show(value) : value;
        if (j) return el("td", column.text ? { class: "text" } : {}, text);
        const state = run.finished ? null : el("span", { class: "soft" }, " (unfinished)");
        return el("td", { class: "text" }, el("button", { onclick: () => open(i) }, `${i + 1}. ${run.name}`), state);
      }),
    ),
  );
  function sort(column) {
    const descending = heads[column].getAttribute("aria-sort") === "ascending";
    const missing = (value) => (typeof value === "number" && !Number.isFinite(value)) || value === null;
    const order = rows
      .map((_, i) => i)
      .sort((a, b) => {
        const [x, y] = [columns[column].key(runs[a]), columns[column].key(runs[b])];
        if (missing(x) || missing(y)) return missing(x) - missing(y); // always last
        const sign = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
        return descending ? -sign : sign;
      });
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[column].setAttribute("aria-sort", descending ? "descending" : "ascending");
    body.append(...order.map((i) => rows[i]));
  }
  body.append(...rows);
  const mark = (chosen) => rows.forEach((row, i) => row.classList.toggle("on", i === chosen));
  return {
    host: el("div", { class: "scroll" }, el("table", { id: "runs" }, el("thead", {}, el("tr", {}, heads)), body)),
    mark,
  };
}

// Places for short labels beside points: the first free one of four, or none, since the mouse tells the name too.
function roomFor() {
  const taken = [];
  return (x, y) => {
    const corners = [
      [x + 9, y + 14],
      [x + 9, y - 6],
      [x - 9, y + 14],
      [x - 9, y - 6],
    ];
    const found = corners.find(([h, v]) => !taken.some(([a, b]) => Math.abs(a - h) < 20 && Math.abs(b - v) < 13));
    if (!found) return null;
    taken.push(found);
    return { x: found[0], y: found[1], "text-anchor": found[0] > x ? "start" : "end" };
  };
}

function tradeOff(runs, fronts, open) {
  let key = "parameters";
  const reading = el("span", { class: "reading" });
  const points = () =>
    runs
      .map((run, i) => ({ run, i, x: run.after[key], y: run.after.accuracy }))
      .filter((point) => point.run.finished && known(point.x) && known(point.y));
  const onFront = () => new Set(fronts[key].flat());
  const rest = fronts.parameters.length
    ? "Best for its size: no other run is both smaller and better."
    : "No line: of each data set one run at most is finished.";
  reading.textContent = rest;
  const drawing = responsive((host, width) => {
    const found = points();
    if (!found.length) return host.replaceChildren(note("No run is finished yet."));
    const [xs, ys] = [found.map((p) => p.x), found.map((p) => p.y)];
    const log = Math.max(...xs) / Math.min(...xs) > 8;
    const room = (Math.max(...ys) - Math.min(...ys)) * 0.15 || 0.01;
    const wide = (Math.max(...xs) - Math.min(...xs)) * 0.08 || Math.max(...xs) * 0.1;
    const nearness = Math.max(...xs) / wide; // runs of nearly one size need more digits to be told apart
    const x = {
      log,
      label: `${key.replace("_", "-")} left${log ? " (log scale)" : ""}`,
      format: (value) => short(value, Math.max(3, 1 + Math.ceil(Math.log10(nearness)))),
      min: log ? Math.min(...xs) / 1.3 : Math.max(0, Math.min(...xs) - wide),
      max: log ? Math.max(...xs) * 1.3 : Math.max(...xs) + wide,
    };
    const y = { min: Math.max(0, Math.min(...ys) - room), max: Math.min(1, Math.max(...ys) + room) };
    const digits = y.max - y.min < 0.04 ? 1 : 0;
    const { svg, px, py } = axes(width, Math.min(320, Math.max(220, width * 0.6)), x, {
      ...y,
      format: (share) => percent(share, digits),
    });
    svg.setAttribute("aria-label", "Accuracy against size");
    for (const front of fronts[key]) {
      svg.append(
        shape("path", {
          class: "line front",
          d: path(
            front.map((i) => [runs[i].after[key], runs[i].after.accuracy]),
            px,
            py,
            true,
          ),
        }),
      );
    }
    const best = onFront();
    const free = roomFor();
    for (const point of found) {
      const say = () =>
        (reading.textContent = `${point.run.name}: ${percent(point.y, 2)}, ${count(point.x)} ${key.replace("_", "-")}`);
      const colour = best.has(point.i) ? "fill blue" : "fill soft";
      const label = free(px(point.x), py(point.y));
      svg.append(
        label ? shape("text", { class: "name", ...label }, String(point.i + 1)) : "",
        shape("circle", {
          class: `dot ${colour}`,
          cx: px(point.x),
          cy: py(point.y),
          r: 6,
          tabindex: 0,
          role: "button",
          "aria-label": point.run.name,
          onpointerenter: say,
          onfocus: say,
          onclick: () => open(point.i),
          onkeydown: (event) => event.key === "Enter" && open(point.i),
        }),
      );
    }
    svg.addEventListener("pointerleave", () => (reading.textContent = rest));
    host.replaceChildren(svg);
  });
  const choice = el(
    "select",
    { id: "size-choice", "aria-label": "Size" },
    el("option", { value: "parameters" }, "parameters"),
    el("option", { value: "multiply_adds" }, "multiply-adds"),
  );
  choice.addEventListener("change", () => {
    key = choice.value;
    drawing.redraw();
  });
  return [
    el("div", { class: "controls" }, el("label", {}, "Accuracy against ", choice)),
    el(
      "div",
      { class: "legend" },
      fronts.parameters.length ? legendItem("blue", "best for its size (Pareto front)") : null,
      legendItem("soft", fronts.parameters.length ? "other runs" : "runs"),
      runs.some((run) => !run.finished) ? el("span", {}, "unfinished runs are left out") : null,
    ),
    drawing.host,
    el("div", { class: "legend" }, reading),
  ];
}
