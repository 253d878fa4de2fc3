// The other views: code, changes, operators, kernels, and where all this comes from.

const TABS = [
  ["picture", "Picture", drawLanes],
  ["code", "Code", drawCode],
  ["changes", "Changes", drawChanges],
  ["operators", "Operators", drawOperators],
  ["kernels", "Kernels", drawKernels],
  ["about", "About", drawAbout],
];

function message(view, text) {
  view.append(el("p", { class: "empty" }, text));
}

function drawCode(app, view) {
  const stage = app.nodeStage() || app.rightStage();
  if (!stage || !stage.text) return message(view, "The text of this stage is not in the page.");
  const lineOf = linesOf(stage);
  const nameAt = new Map([...lineOf].map(([name, line]) => [line, name]));
  const mark = app.node && lineOf.has(app.node) ? lineOf.get(app.node) : -1;
  view.append(el("p", { class: "file" }, `${stage.file} · ${plural(stage.lines.length, "line")}`),
    lineView(stage.lines, {
      mark,
      kindOf: (line) => (line.trim().startsWith("#") ? "comment" : ""),
      click: (i) => nameAt.has(i) && app.choose(nameAt.get(i), stage.name),
    }));
}

function drawChanges(app, view) {
  const stage = app.rightStage();
  const number = stage ? /^(\d+)-/.exec(stage.file) : null;
  const name = number ? `diff-${number[1]}.txt` : "";
  const text = app.data.texts[name];
  if (!text) {
    return message(view, app.data.left_out.includes(name)
      ? `${name} is too long for this page; it lies beside it.`
      : "Nothing comes before this stage among the passes: move the slider on.");
  }
  const lines = text.split("\n");
  const added = lines.filter((l) => diffKind(l) === "added").length;
  const removed = lines.filter((l) => diffKind(l) === "removed").length;
  view.append(el("p", { class: "file" }, `${name} · ${added} lines added, ${removed} removed`),
    lineView(lines, { kindOf: diffKind }));
}

function drawOperators(app, view) {
  const stages = app.data.stages;
  if (!stages.length) return message(view, "No stages were recorded.");
  const counts = stages.map((stage) => {
    const found = new Map();
    for (const node of stage.nodes) {
      if (node.op === "call_function") found.set(node.target, (found.get(node.target) || 0) + 1);
    }
    return found;
  });
  // Dynamo and Inductor change the graph too, ahead of the passes and behind them.
  const passes = stages.map((s, i) => i).filter((i) => !["captured", "final"].includes(stages[i].name));
  const change = (op) => passes.length
    ? (counts[passes[passes.length - 1]].get(op) || 0) - (counts[passes[0]].get(op) || 0) : 0;
  const names = [...new Set(counts.flatMap((found) => [...found.keys()]))]
    .sort((a, b) => Math.abs(change(b)) - Math.abs(change(a)) || a.localeCompare(b));
  const total = counts.map((found) => [...found.values()].reduce((a, b) => a + b, 0));
  const row = (name, numbers, delta, tag = "td") => el("tr", {}, el(tag, { class: "mono" }, name),
    numbers.map((n) => el(tag, { class: "n" }, n === 0 ? "·" : String(n))),
    el(tag, { class: `n ${delta > 0 ? "up" : delta < 0 ? "down" : ""}` },
      typeof delta === "number" ? (delta > 0 ? `+${delta}` : delta ? String(delta) : "") : delta));
  view.append(el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, row("operator", stages.map((s) => s.name), "change by the passes", "th")),
    el("tbody", {}, names.map((op) => row(op, counts.map((f) => f.get(op) || 0), change(op)))),
    el("tfoot", {}, row("all calls", total,
      passes.length ? total[passes[passes.length - 1]] - total[passes[0]] : "")))));
}

function drawKernels(app, view) {
  const { story, code } = app.data;
  if (!code) return message(view, "No code was generated: backend \"swa_eager\", or the passes alone.");
  const lines = code.split("\n");
  const text = lineView(lines, { mark: app.kernelLine ? app.kernelLine - 1 : -1 });
  const pieces = new Set(story.kernels.map((kernel) => kernel.partition).filter((piece) => piece !== null));
  const list = el("div", { class: "scroll kernels" }, el("table", {},
    el("thead", {}, el("tr", {}, ["", "kernel call", "kind", "piece", "computes"].map((h) => el("th", {}, h)))),
    el("tbody", {}, story.kernels.map((kernel, i) => el("tr", { class: kernel.mapping ? "reads" : "" },
      el("td", { class: "n" }, String(i + 1)),
      el("td", { class: "mono" }, el("button", { class: "link", type: "button", title: kernel.name,
        onclick: () => text.show(kernel.line - 1) }, kernel.name.replace(/^torch\.ops\./, ""))),
      el("td", {}, kernel.kind, kernel.mapping ? el("b", {}, " reads the mapping") : ""),
      el("td", { class: "n" }, kernel.partition === null ? "" : `P${kernel.partition}`),
      el("td", { class: "nodes", title: kernel.nodes }, kernel.nodes))))));
  view.append(el("p", { class: "file" }, `03-inductor.py · ${plural(story.kernels.length, "kernel call")}`
    + (pieces.size ? ` in ${plural(pieces.size, "piece")} and between them` : "")
    + (app.data.report.mapping_kernels === null || app.data.report.mapping_kernels === undefined
      ? "" : ` · ${app.data.report.mapping_kernels} read the mapping`)), list, text);
}

function drawAbout(app, view) {
  const { graph, report, texts, stages } = app.data;
  const table = (title, object) => [el("h3", {}, title), el("table", { class: "pairs" }, el("tbody", {},
    Object.entries(object).map(([key, value]) => el("tr", {}, el("td", {}, key),
      el("td", { class: "mono" }, typeof value === "string" ? value : JSON.stringify(value))))))];
  const times = Object.fromEntries(stages.filter((s) => s.seconds !== undefined)
    .map((s) => [s.name, `${(s.seconds * 1e3).toFixed(1)} ms`]));
  view.append(el("div", { class: "scroll about" },
    table("Made by", graph.provenance || {}),
    graph.options && graph.options.backend ? table("Options", graph.options.backend) : null,
    Object.keys(times).length ? table("Time of the passes up to each stage", times) : null,
    table("Files beside this page", Object.fromEntries(
      Object.entries(texts).map(([name, text]) => [name, plural(text.split("\n").length - 1, "line")]))),
    el("h3", {}, "Report"), el("pre", { class: "snippet" }, JSON.stringify(report, null, 2))));
}
