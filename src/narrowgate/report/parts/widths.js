// The network from its first layer to its last, as wide as each layer has channels.
function widths(run) {
  if (!run.layers.length) {
    const unchanged = run.after.parameters === run.before.parameters;
    const missing = "Not known: the run's folder lacks its small network. Copy the run again, with small/.";
    const end = unchanged ? "This run removed nothing." : missing;
    const why = run.finished ? end : "The widths of the layers come with the end of the run.";
    return section("widths", "Width of the network", note(why));
  }
  const most = Math.max(...run.layers.map((layer) => layer.total));
  const some = run.layers.some((layer) => layer.used < layer.kept);
  const reading = el("span", { class: "reading" });
  const totals = ["kept", "total"].map((key) => run.layers.reduce((sum, layer) => sum + layer[key], 0));
  const overall = `${plural(run.layers.length, "layer")}: ${whole(totals[0])} of ${whole(totals[1])} channels kept`;
  const say = (layer) => {
    const idle = layer.kept - layer.used;
    const extra = idle > 0 ? ` (${whole(idle)} of them idle here: ${layer.why || "kept for other layers"})` : layer.kept ? "" : ` (${layer.why})`;
    return `${layer.name}: ${whole(layer.kept)} of ${whole(layer.total)} channels kept${extra}`;
  };
  reading.textContent = overall;
  const drawing = responsive((host, width) => {
    const [tallest, height] = [212, 236];
    const middle = tallest / 2;
    const step = width / run.layers.length;
    const gap = Math.min(3, step / 5);
    const svg = shape("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": overall });
    run.layers.forEach((layer, i) => {
      for (const [key, colour] of [
        ["total", "faint"],
        ["kept", "mid"],
        ["used", "blue"],
      ]) {
        const tall = layer[key] ? Math.max(1.5, (tallest * layer[key]) / most) : 0;
        const box = { x: i * step + gap / 2, width: step - gap, y: middle - tall / 2, height: tall };
        svg.append(shape("rect", { class: `fill ${colour}`, ...box }));
      }
    });
    const over = shape("rect", { class: "hit on", y: 0, height: tallest, width: step, visibility: "hidden" });
    svg.append(
      over,
      shape("text", { x: 0, y: height - 4 }, "first layer"),
      shape("text", { x: width, y: height - 4, "text-anchor": "end" }, "last layer"),
    );
    const moved = (position) => {
      const i = Math.max(0, Math.min(run.layers.length - 1, Math.floor(position / step)));
      over.setAttribute("x", i * step);
      over.setAttribute("visibility", "visible");
      reading.textContent = say(run.layers[i]);
    };
    follow(svg, moved, () => {
      over.setAttribute("visibility", "hidden");
      reading.textContent = overall;
    });
    host.replaceChildren(svg);
  });
  const legend = el(
    "div",
    { class: "legend" },
    legendItem("faint", "at the start"),
    some
      ? [legendItem("blue", "kept and in use"), legendItem("mid", "kept, but idle in this layer")]
      : legendItem("blue", "kept"),
  );
  const columns = ["Layer", "At the start", "Kept", "Left", "In use"].map((name) => ({ name }));
  const rows = run.layers.map((layer) => [
    layer.name,
    whole(layer.total),
    whole(layer.kept),
    percent(layer.kept / layer.total, 0),
    whole(layer.used),
    layer.why || "",
  ]);
  return section(
    "widths",
    "Width of the network",
    note(
      "Each bar is a layer, in the order in which data passes; its height is its number of channels, ",
      `at most ${whole(most)}.`,
    ),
    legend,
    drawing.host,
    el("div", { class: "legend" }, reading),
    el(
      "details",
      {},
      el("summary", {}, "All layers as a table"),
      table([...columns, { name: "Why idle channels stay", text: true }], rows),
    ),
  );
}
