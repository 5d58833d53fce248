// Everything about one run.
function cards(run) {
  const card = (label, value, from, share) =>
    el(
      "div",
      { class: "card" },
      el("div", { class: "label" }, label),
      el("div", { class: "value" }, value),
      known(share) ? el("div", { class: "left" }, el("div", { style: `width:${Math.min(100, 100 * share)}%` })) : null,
      el("div", { class: "from" }, from),
    );
  const size = (label, key) => {
    const [before, after] = [run.before[key], run.after[key]];
    const share = after / before;
    const show = before >= 1e6 ? short : whole; // both in one way
    return card(
      label,
      show(after),
      known(share) ? `of ${show(before)}: ${percent(share)} left` : "not known yet",
      share,
    );
  };
  const accuracy = run.finished
    ? card(
        "Test accuracy",
        percent(run.after.accuracy, 2),
        `${percent(run.before.accuracy, 2)} before channels were removed`,
      )
    : card(
        `Accuracy (${run.held_out} images)`,
        percent(run.after.accuracy, 2),
        run.done ? `after epoch ${run.done}` : "no epoch yet",
      );
  return el(
    "div",
    { class: "cards" },
    accuracy,
    size("Parameters", "parameters"),
    size("Multiply-adds per image", "multiply_adds"),
    latencyCard(run, card),
  );
}

function kept(run) {
  if (!run.has_plan) return null;
  const constants = run.constants.length
    ? table(
        [
          { name: "Layer" },
          { name: "Put into the bias" },
          { name: "Merged into one channel" },
          { name: "Still put out as a number" },
        ],
        run.constants.map((entry) => [entry.layer, whole(entry.folded), whole(entry.carried), whole(entry.rows)]),
      )
    : note(
        run.layers.some((layer) => layer.kept < layer.total)
          ? "None: every removed channel was zero."
          : "None: no channel was removed.",
      );
  const walls = run.walls.length
    ? table(
        [{ name: "Operation" }, { name: "Why", text: true }, { name: "Where", text: true }],
        run.walls.map((wall) => [
          wall.op,
          wall.why,
          wall.layers.slice(0, 5).join(", ") + (wall.layers.length > 5 ? ` and ${wall.layers.length - 5} more` : ""),
        ]),
      )
    : note("None: no operation stood in the way.");
  return section(
    "met",
    "Constants and walls",
    el("h3", {}, "Constants"),
    note(
      "A closed channel need not be zero: behind a norm it may be a fixed number, which later layers still add. Channels, by what was done so that the result stays the same:",
    ),
    constants,
    el("h3", {}, "Walls"),
    note("Operations that need all of their channels, so that none of them can go there."),
    walls,
  );
}

function about(run) {
  const entries = {
    Network: run.network,
    Data: run.data,
    Method: run.method,
    Epochs: `${run.done} of ${run.epochs}`,
    ...run.facts,
  };
  return section(
    "about",
    "How it was made",
    el(
      "dl",
      {},
      Object.entries(entries).map(([term, text]) => [el("dt", {}, term), el("dd", {}, text)]),
    ),
    el("details", {}, el("summary", {}, "The whole recipe"), el("pre", {}, run.recipe)),
  );
}

function runPage(run) {
  const state = run.finished
    ? null
    : el(
        "p",
        { class: "warn" },
        `This run is not finished: ${run.done} of ${plural(run.epochs, "epoch")} are done. `,
        "The numbers are those of its last epoch; channels whose gates closed since the last cut still count. Go on with ",
        el("code", {}, "narrowgate train RECIPE --resume"),
        ".",
      );
  return [
    el("h1", {}, run.name),
    el("p", { class: "soft" }, `${run.network} on ${run.data}: ${run.method}`),
    state,
    cards(run),
    course(run),
    widths(run),
    gateHistograms(run),
    curve(run),
    latency(run),
    kept(run),
    about(run),
  ].filter((part) => part !== null);
}
