// How a run went, and what closing more gates at its end would do.
function course(run) {
  const { epoch } = run.course;
  if (!epoch.length) return section("course", "Over the epochs", note("No epoch is finished yet."));
  const pairs = (key, divisor = 1) =>
    epoch.map((x, i) => [x, known(run.course[key][i]) ? run.course[key][i] / divisor : null]);
  const sizes = ["parameters", "multiply_adds"].map((key) => [...pairs(key, run.before[key] || 1)]);
  const marks = run.events.map(([x, text]) => ({ x, text: text.replace("->", "→") }));
  const end = run.epochs + 1;
  if (run.finished)
    ["parameters", "multiply_adds"].forEach((key, i) => sizes[i].push([end, run.after[key] / (run.before[key] || 1)]));
  const x = {
    min: Math.min(1, epoch[0]),
    max: run.finished ? end : Math.max(run.epochs, 2),
    label: "epoch",
    format: whole,
    ticks: (wanted) =>
      ticks(0, run.epochs, wanted)
        .map((tick) => tick || 1)
        .filter(Number.isInteger),
  };
  const at = (stop) => (stop > run.epochs ? "at the end" : `epoch ${stop}`);
  const shares = [...run.course.accuracy, ...run.course.train_accuracy].filter(known);
  const lowest = shares.length ? Math.min(...shares) : 0;
  const low = lowest > 0.9 ? 0.9 : lowest > 0.6 ? 0.5 : 0;
  const y = { max: 1, format: (share) => percent(share, 0) };
  const exact = (share) => percent(share, 2);
  const cuts = marks.length
    ? el(
        "details",
        {},
        el("summary", {}, `Vertical lines: ${plural(marks.length, "cut")} during training`),
        el(
          "ul",
          {},
          marks.map((mark) => el("li", {}, `epoch ${mark.x}: ${mark.text}`)),
        ),
      )
    : null;
  const training = run.course.train_accuracy.some(known)
    ? [{ name: "on training images", colour: "soft", points: pairs("train_accuracy"), format: exact }]
    : [];
  return section(
    "course",
    "Over the epochs",
    el("h3", {}, "Accuracy"),
    plot({
      title: "Accuracy over the epochs",
      x,
      y: { ...y, min: low },
      at,
      marks,
      lines: [
        { name: `on ${run.held_out} images`, colour: "blue", points: pairs("accuracy"), format: exact },
        ...training,
      ],
    }),
    el("h3", {}, "What is left of the network"),
    plot({
      title: "Size over the epochs",
      x,
      y: { ...y, min: 0 },
      at,
      marks,
      lines: [
        { name: "parameters", colour: "red", points: sizes[0], step: true, format: percent },
        { name: "multiply-adds", colour: "green", points: sizes[1], step: true, format: percent },
        {
          name: "open gates",
          colour: "soft",
          points: pairs("closed").map(([e, share]) => [e, known(share) ? 1 - share : null]),
          format: percent,
        },
      ],
    }),
    cuts,
  );
}

function curve(run) {
  if (!run.curve) {
    const how = [
      "No threshold curve was recorded. To have one here, RUN being the run's folder: ",
      el("code", {}, "narrowgate record RUN --curve --out RUN/record.json"),
    ];
    const why = run.method === "no gates" ? ["This run trained without gates: there are none to close."] : how;
    return section("curve", "Closing more gates: the threshold curve", note(...why));
  }
  const { threshold, accuracy, pruned } = run.curve;
  const positive = threshold.filter((value) => value > 0);
  const zero = Math.min(...positive) / 10;
  const place = (value) => (value > 0 ? value : zero);
  const points = (values, turn = (value) => value) =>
    threshold.map((value, i) => [place(value), known(values[i]) ? turn(values[i]) : null]);
  const format = (value) => (value <= zero * 1.001 ? "0" : plain(value));
  return section(
    "curve",
    "Closing more gates: the threshold curve",
    note(
      "If every gate up to a threshold were closed: what would be left, and how good it would be without further training.",
    ),
    plot({
      title: "Accuracy and size by threshold",
      x: {
        min: zero,
        max: Math.max(...positive),
        log: true,
        label: "threshold on the gates' values (log scale)",
        format,
        ticks: (wanted) => [zero, ...logTicks(Math.min(...positive), Math.max(...positive), wanted - 1)],
      },
      y: { min: 0, max: 1, format: (share) => percent(share, 0) },
      at: (stop) => `threshold ${format(stop)}`,
      lines: [
        {
          name: "test accuracy",
          colour: "blue",
          points: points(accuracy),
          dots: true,
          format: (share) => percent(share, 2),
        },
        {
          name: "parameters left",
          colour: "red",
          points: points(pruned, (share) => 1 - share),
          dots: true,
          format: percent,
        },
      ],
    }),
  );
}
