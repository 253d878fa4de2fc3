// The middle of the picture: the one node with its values, refused ones apart, and what reads the
// mapping in the generated code.

function middleBox(app, early) {
  const { story, report } = app.data;
  const list = el("div", { class: "values" });
  const good = [], bad = [];
  story.values.forEach((value, i) => (value.code ? bad : good).push(i));
  const entry = (i) => {
    const value = story.values[i];
    return el("button", {
      class: `value ${hueOf(app, i)}`, type: "button", "data-value": i,
      "aria-label": `value ${value.loc} through ${value.mapping}, used ${value.uses} times`,
      onclick: () => app.chooseValue(i),
    },
    value.code ? el("span", { class: "code" }, value.code) : null,
    el("span", { class: "loc" }, value.loc),
    el("span", { class: "via" }, `through ${value.mapping}`),
    el("span", { class: "type" },
      `${SHORT[value.dtype] || value.dtype}[${value.shape.join(", ")}]`,
      el("b", {}, ` ${value.uses}×`)),
    value.code && (value.refused_at || value.source)
      ? el("span", { class: "where" }, (value.refused_at || value.source).split("/").slice(-2).join("/"))
      : null);
  };
  if (good.length) {
    list.append(el("div", { class: `one${early && !report.from_cache ? " ghost" : ""}` },
      el("div", { class: "one-title" }, early && !report.from_cache ? "will be one node" : "swa::translate_many"),
      good.map(entry)));
  }
  if (bad.length) {
    list.append(el("div", { class: `apart${early && !report.from_cache ? " ghost" : ""}` },
      el("div", { class: "one-title" }, `refused: ${bad.length}`), bad.map(entry)));
  }
  if (!story.values.length) {
    list.append(el("p", { class: "faint" }, report.from_cache && (report.values || []).length
      ? "see the report" : "no marked translation"));
  }
  const reading = story.kernels.filter((kernel) => kernel.mapping);
  const foot = el("div", { class: "foot" },
    report.invariants_hoisted ? el("p", {}, `${report.invariants_hoisted} index computations moved or merged beside it`) : null,
    reading.length ? el("p", {}, `${plural(reading.length, "kernel")} of ${story.kernels.length} read the mapping:`) : null,
    reading.slice(0, 2).map((kernel) => el("button", { class: "link mono", type: "button",
      title: kernel.name, onclick: () => app.openKernel(kernel) }, kernel.name)));
  const box = el("div", { class: "middle" }, list, foot);
  const mark = () => {
    for (const button of list.querySelectorAll(".value")) {
      button.classList.toggle("chosen", Number(button.dataset.value) === app.value && !app.node);
    }
  };
  mark();
  const needs = () => list.scrollHeight + foot.scrollHeight + 10;
  return { box, list, mark, needs };
}
