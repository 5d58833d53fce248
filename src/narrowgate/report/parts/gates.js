// Histograms of the gates' values over time, one layer or all together.
function gateHistograms(run) {
  const data = run.gates;
  if (!data) {
    const why = run.method === "no gates" ? "This run trained without gates." : "No gate values were kept of this run.";
    return section("gates", "Gate values", note(why));
  }
  const bins = data.edges.length;
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
  // One snapshot of one layer, or of all (-1): gone with their channels, closed, and by bin.
  const take = (snapshot, layer) => {
    const taken = new Array(bins + 2).fill(0);
    const layers = layer < 0 ? data.layers.map((_, i) => i) : [layer];
    for (const i of layers) {
      const [closed, first, ...counts] = data.counts[snapshot][i];
      counts.forEach((number, j) => (taken[2 + first + j] += number));
      taken[1] += closed;
      taken[0] += data.totals[i] - closed - sum(counts);
    }
    return taken;
  };
  const name = (bin) => {
    if (bin === 0) return "removed with their channels";
    if (bin === 1) return "closed (exactly 0)";
    const [low, high] = [data.edges[bin - 2], data.edges[bin - 1]];
    if (bin === 2) return `open, below ${plain(high)}`;
    return high === undefined ? `${plain(low)} or more` : `from ${plain(low)} to ${plain(high)}`;
  };
  let layer = -1;
  const last = data.epochs.length - 1;
  const slider = el("input", {
    type: "range",
    min: 0,
    max: last,
    value: last,
    step: 1,
    id: "epoch-slider",
    "aria-label": "Epoch",
  });
  const label = el("b", { id: "epoch-label" });
  const reading = el("span", { class: "reading" });
  const choice = el(
    "select",
    { id: "layer-choice", "aria-label": "Layer" },
    el("option", { value: -1 }, `all ${data.layers.length} layers`),
    data.layers.map((text, i) => el("option", { value: i }, `${text} (${whole(data.totals[i])})`)),
  );
  const summary = (taken) =>
    `${whole(sum(taken))} gates: ${whole(taken[0])} removed, ${whole(taken[1])} closed, ${whole(sum(taken.slice(2)))} open`;
  const drawing = responsive((host, width) => {
    const taken = take(Number(slider.value), layer);
    const most = Math.max(...data.epochs.map((_, i) => Math.max(...take(i, layer))), 1);
    label.textContent = `epoch ${data.epochs[slider.value]} of ${run.epochs}`;
    reading.textContent = summary(taken);
    host.replaceChildren(
      histogram(width, taken, most, data.edges, (bin) => {
        reading.textContent = bin === null ? summary(taken) : `${name(bin)}: ${plural(taken[bin], "gate")}`;
      }),
    );
  });
  slider.addEventListener("input", drawing.redraw);
  choice.addEventListener("change", () => {
    layer = Number(choice.value);
    drawing.redraw();
  });
  return section(
    "gates",
    "Gate values",
    note(
      "A gate multiplies one channel. Training pulls gates to 0; a closed gate's channel can be removed. ",
      "Heights are square roots of counts, so that single gates can be seen.",
    ),
    el("div", { class: "controls" }, label, slider, choice),
    el(
      "div",
      { class: "legend" },
      legendItem("soft", "removed"),
      legendItem("red", "closed"),
      legendItem("blue", "open, by value"),
    ),
    drawing.host,
    el("div", { class: "legend" }, reading),
  );
}

function histogram(width, taken, most, edges, read) {
  const height = 220;
  const step = (width - MARGIN.left - MARGIN.right) / (taken.length + 1);
  const left = (bin) => MARGIN.left + (bin + (bin > 1 ? 1 : 0)) * step;
  const bottom = height - MARGIN.bottom;
  const tall = scale({ min: 0, max: Math.sqrt(most) }, 0, bottom - MARGIN.top);
  const svg = shape("svg", {
    height,
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": "Histogram of gate values",
  });
  let previous = -Infinity;
  for (const value of [0, 1, ...logTicks(2, Math.max(2, most), 99)].filter((tick) => tick <= most)) {
    const y = tall(Math.sqrt(value));
    if (y - previous < 16) continue;
    previous = y;
    svg.append(
      shape("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom - y, y2: bottom - y }),
      shape("text", { x: MARGIN.left - 6, y: bottom - y + 4, "text-anchor": "end" }, short(value)),
    );
  }
  taken.forEach((number, bin) => {
    const y = tall(Math.sqrt(number));
    const colour = ["soft", "red"][bin] ?? "blue";
    svg.append(
      shape("rect", {
        class: `fill ${colour} bar`,
        x: left(bin) + 1,
        width: Math.max(1, step - 2),
        y: bottom - y,
        height: y,
      }),
      shape("rect", {
        class: "hit",
        x: left(bin),
        width: step,
        y: 0,
        height: bottom,
        onpointerenter: () => read(bin),
        onpointerdown: () => read(bin),
      }),
    );
  });
  svg.addEventListener("pointerleave", () => read(null));
  const every = width < 560 ? 2 : 1;
  edges.forEach((edge, i) => {
    const power = Math.round(Math.log10(edge));
    if (Math.abs(edge / 10 ** power - 1) > 1e-3 || power % every) return;
    const x = left(2 + i);
    if (x - left(1) < 34) return; // no room beside the 0 of closed gates
    svg.append(
      shape("line", { class: "axis", x1: x, x2: x, y1: bottom, y2: bottom + 4 }),
      shape("text", { x, y: bottom + 17, "text-anchor": "middle" }, plain(10 ** power)),
    );
  });
  svg.append(
    shape("text", { x: left(1), y: bottom + 17, "text-anchor": "middle" }, "0"),
    shape("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom }),
    shape("text", { x: width - MARGIN.right, y: height - 4, "text-anchor": "end" }, "value of a gate (log scale)"),
  );
  return svg;
}
