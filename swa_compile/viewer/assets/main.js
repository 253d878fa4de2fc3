// What is shown: the view, the stage, the chosen node; and the ways to change it.

const app = {
  data: null, tab: "picture", stop: 0, node: "", nodeAt: "", value: null, piece: null, cursor: "",
  query: "", hits: [], hitNames: new Set(), hit: 0, scroll: 0, kernelLine: 0,
  revealLayer() {}, redrawLanes() {},

  rightStage() { return app.data.stages[app.stop]; },
  nodeStage() { return (app.node && app.data.stage(app.nodeAt)) || app.rightStage(); },

  choose(name, stage) {
    const node = app.data.stage(stage) && app.data.stage(stage).byName.has(name);
    if (!node) return;
    Object.assign(app, { node: name, nodeAt: stage, value: null, piece: null, query: "" });
    $("search").value = "";
    const layer = app.data.layerOf.get(`${stage} ${name}`);
    if (app.tab === "picture") {
      if (layer !== undefined) app.revealLayer(layer);
      app.redrawLanes();
    } else if (app.tab === "code") drawView();
    drawDetails(app);
    remember();
  },
  chooseValue(i) {
    Object.assign(app, { node: "", nodeAt: "", value: i, piece: null, query: "" });
    $("search").value = "";
    app.redrawLanes();
    drawDetails(app);
    remember();
  },
  choosePiece(i) {
    Object.assign(app, { node: "", nodeAt: "", value: null, piece: i, query: "" });
    $("search").value = "";
    app.redrawLanes();
    drawDetails(app);
    remember();
  },
  clear() {
    Object.assign(app, { node: "", nodeAt: "", value: null, piece: null, query: "", hits: [], hitNames: new Set() });
    $("search").value = "";
    app.redrawLanes();
    drawDetails(app);
    remember();
  },
  openTab(name) {
    app.tab = name;
    drawView();
    remember();
  },
  openKernel(kernel) {
    app.kernelLine = kernel.line;
    app.openTab("kernels");
  },
  toStop(i) {
    const stop = Math.max(0, Math.min(app.data.stages.length - 1, i));
    if (stop === app.stop) return;
    app.stop = stop;
    const stage = app.rightStage();
    // The node that was chosen stays chosen where it lives on.
    if (app.node && stage.byName.has(app.node)) app.nodeAt = stage.name;
    else Object.assign(app, { node: "", nodeAt: "" });
    if (app.query) find(app.query);
    drawView();
    drawDetails(app);
    remember();
  },
};

function drawView() {
  for (const tab of $("tabs").children) tab.setAttribute("aria-selected", tab.dataset.tab === app.tab);
  markStop();
  const view = $("view");
  view.replaceChildren();
  Object.assign(app, { revealLayer() {}, redrawLanes() {} });
  view.className = app.tab;
  TABS.find(([name]) => name === app.tab)[2](app, view);
}

function markStop() {
  $("slider").value = app.stop;
  [...$("stops").children].forEach((stop, i) => stop.classList.toggle("current", i === app.stop));
  const stage = app.rightStage();
  $("slider").setAttribute("aria-valuetext", stage ? stage.name : "");
}

function find(query) {
  const stage = app.nodeStage();
  Object.assign(app, { query: query.trim(), hit: 0 });
  app.hits = app.query && stage ? search(stage, app.query, stage.name === "captured" ? {} : app.data.story.inputs) : [];
  app.hitNames = new Set(app.hits.map((node) => node.name));
}

function drawHead() {
  const { report, title } = app.data;
  $("title").textContent = title;
  const figure = (value, what, kind = "") =>
    el("div", { class: `figure ${kind}` }, el("b", {}, value), el("span", {}, what));
  if (!("translations_found" in report)) {
    $("figures").append(figure("failed", "a pass raised", "bad"));
    return;
  }
  const refused = report.refused.length;
  const left = report.translations_left;
  const figures = [
    figure(`${report.translations_found} → ${report.translation_nodes}`, "translations → nodes", "lead"),
    figure(report.values.length, "values"),
    figure(refused, "refused", refused ? "bad" : "good"),
    figure(left, "left in layer code", left ? "bad" : "good"),
    figure(`${report.stores_lowered}/${report.stores_found}`, "stores lowered"),
  ];
  if (report.cache_copies !== null) {
    figures.push(figure(report.cache_copies, "cache copies", report.cache_copies ? "bad" : "good"));
  }
  if (report.partitions !== null) figures.push(figure(report.partitions, "partitions"));
  const { captures } = app.data;
  if (captures) {
    figures.push(figure(captures.captures, "CUDA graphs", captures.skipped.length ? "bad" : ""));
  }
  if (report.from_cache) figures.push(figure("warm", "from the cache", "lead"));
  $("figures").append(...figures);
}

function drawBar() {
  TABS.forEach(([name, label], i) => $("tabs").append(el("button", {
    type: "button", role: "tab", "data-tab": name, title: `${label} (${i + 1})`,
    onclick: () => app.openTab(name),
  }, label)));
  const slider = $("slider");
  const last = Math.max(0, app.data.stages.length - 1);
  slider.max = last;
  $("stages").style.setProperty("--stops", last + 1);
  slider.disabled = last === 0;
  slider.addEventListener("input", () => app.toStop(Number(slider.value)));
  app.data.stages.forEach((stage, i) => $("stops").append(el("button", {
    type: "button", tabindex: -1, onclick: () => app.toStop(i),
  }, stage.name)));
  const box = $("search");
  box.addEventListener("input", () => {
    find(box.value);
    app.redrawLanes();
    drawDetails(app);
  });
  box.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && app.hits.length) {
      app.hit = (app.hit + step + Math.min(app.hits.length, HITS)) % Math.min(app.hits.length, HITS);
      drawDetails(app);
      event.preventDefault();
    } else if (event.key === "Enter" && app.hits.length) {
      app.choose(app.hits[app.hit].name, app.nodeStage().name);
      box.blur();
    }
  });
}

async function start() {
  theme(app);
  try {
    app.data = index(await load());
  } catch (error) {
    $("view").append(el("p", { class: "empty" }, `This page cannot be shown: ${error}. It needs a `
      + "browser with DecompressionStream (Chrome 80, Firefox 113, Safari 16.4)."));
    return;
  }
  recall();
  drawHead();
  drawBar();
  drawView();
  drawDetails(app);
  remember({ anew: true });
  document.addEventListener("keydown", keys);
  window.addEventListener("hashchange", goBack);
  document.documentElement.dataset.ready = "yes";
}

start();
