const { runs, fronts } = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");
const details = el("div", { id: "run" });
const footer = el("footer", {}, "Made by narrowgate report. This file needs no network and no other file.");

if (runs.length > 1) {
  const open = (i) => {
    details.replaceChildren(...runPage(runs[i]));
    list.mark(i);
    choice.value = i;
  };
  const jump = (i) => {
    open(i);
    details.scrollIntoView({ behavior: "smooth" });
  };
  const list = compareTable(runs, jump);
  const choice = el(
    "select",
    { id: "run-choice", "aria-label": "Run", onchange: (event) => open(Number(event.target.value)) },
    runs.map((run, i) => el("option", { value: i }, `${i + 1}. ${run.name}`)),
  );
  const sets = [...new Set(runs.map((run) => run.data))];
  page.replaceChildren(
    el("h1", {}, `${runs.length} runs side by side`),
    sets.length > 1
      ? el(
          "p",
          { class: "warn" },
          `These runs are of different data (${sets.join(", ")}): their accuracies do not compare.`,
        )
      : "",
    section("trade-off", "Accuracy against size", tradeOff(runs, fronts, jump)),
    section("table", "All runs", note("Click a heading to sort, a name to see the run below."), list.host),
    el("div", { class: "controls" }, el("label", {}, "Details of run ", choice)),
    details,
    footer,
  );
  open(0);
} else {
  details.append(...runPage(runs[0]));
  page.replaceChildren(details, footer);
}
