// How long both networks take, if that was measured.
const MODES = { eager: "plain PyTorch", compiled: "torch.compile", onnx: "ONNX Runtime", graph: "CUDA graph" };
const places = { cpu: "CPU", cuda: "GPU" };

function latencyCard(run, card) {
  if (!run.latency?.timings.length) return card("Latency", "–", "not measured");
  const smallest = Math.min(...run.latency.timings.map((timing) => timing.batch));
  const best = run.latency.timings
    .filter((timing) => timing.batch === smallest)
    .reduce((a, b) => (b.after.median < a.after.median ? b : a));
  const how = `${places[best.device] ?? best.device}, ${MODES[best.mode] ?? best.mode}, batch ${best.batch}`;
  const share = best.ratio.median;
  return card(
    "Latency",
    time(best.after.median),
    `${time(best.before.median)} at full size: ${percent(share, 0)} (${how})`,
    share,
  );
}

function latency(run) {
  if (!run.latency) {
    return section(
      "latency",
      "Latency",
      note(
        "Not measured. To have it here, RUN being the run's folder: ",
        el("code", {}, "narrowgate measure RUN --json RUN/latency.json"),
      ),
    );
  }
  const rows = run.latency.timings.map((timing) => [
    `${places[timing.device] ?? timing.device}, ${MODES[timing.mode] ?? timing.mode}`,
    whole(timing.batch),
    time(timing.before.median),
    time(timing.after.median),
    `${percent(timing.ratio.median, 0)} (${percent(timing.ratio.q1, 0)} to ${percent(timing.ratio.q3, 0)})`,
    timing.verdict,
  ]);
  const names = [
    "Run on",
    "Images at once",
    "Full size",
    "Small network",
    "Small / full size (middle half of rounds)",
    "Verdict",
  ];
  const missing = run.latency.missing.map((entry) => el("li", {}, `${entry.device}, ${entry.mode}: ${entry.why}`));
  return section(
    "latency",
    "Latency",
    note(
      `Time for one batch, medians; ${Object.values(run.latency.devices).join(", ")}; inputs ${run.latency.inputs}.`,
    ),
    table(
      names.map((name) => ({ name })),
      rows,
    ),
    missing.length ? el("details", {}, el("summary", {}, "Not timed"), el("ul", {}, missing)) : null,
  );
}
