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

// What is shown stands in the address, for reloading and for the browser's back and forward.
function remember({ anew = false } = {}) {
  const state = new URLSearchParams();
  const shown = app.rightStage() ? app.rightStage().name : "";
  if (app.tab !== "picture") state.set("view", app.tab);
  if (shown) state.set("stage", shown);
  if (app.node) state.set("node", app.node);
  if (app.node && app.nodeAt !== shown) state.set("at", app.nodeAt);
  if (app.value !== null) state.set("value", app.value);
  if (app.piece !== null) state.set("piece", app.piece);
  if (location.hash === `#${state}`) return;
  try { history[anew ? "replaceState" : "pushState"](null, "", `#${state}`); } catch { /* not allowed here */ }
}

function recall() {
  const { stages, story } = app.data;
  const state = new URLSearchParams(location.hash.slice(1));
  const known = (key, values) => (values.some((value) => String(value) === state.get(key)) ? state.get(key) : null);
  const place = (found) => (found === null ? null : Number(found));
  const stop = stages.findIndex((stage) => stage.name === state.get("stage"));
  Object.assign(app, {
    tab: known("view", TABS.map(([name]) => name)) || "picture",
    stop: stop >= 0 ? stop : Math.max(0, stages.length - 1),
    node: "", nodeAt: "", query: "", hits: [], hitNames: new Set(),
    value: place(known("value", [...story.values.keys()])),
    piece: place(known("piece", story.pieces.map((item) => item.piece))),
  });
  const stage = app.data.stage(state.get("at")) || app.rightStage();
  if (stage && stage.byName.has(state.get("node"))) {
    Object.assign(app, { node: state.get("node"), nodeAt: stage.name, value: null, piece: null });
  }
}

function goBack() {
  recall();
  $("search").value = "";
  drawView();
  drawDetails(app);
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

// Arrow keys move among the chips: up and down through the lanes, left and right within one.
function move(key) {
  const match = /^([ab])(\d+)\.(\d+)$/.exec(app.cursor);
  const layers = app.data.story.layers;
  if (!match) {
    const first = document.querySelector(".chip");
    if (first) { app.cursor = first.dataset.at; first.focus(); }
    return;
  }
  let [side, row, col] = [match[1], Number(match[2]), Number(match[3])];
  const chips = (r, s) => document.querySelectorAll(`[data-at^="${s}${r}."]`).length;
  if (key === "ArrowLeft" || key === "ArrowRight") {
    col += key === "ArrowRight" ? 1 : -1;
    if (col < 0) { if (side === "b" || !chips(row, "b")) return; side = "b"; col = chips(row, "b") - 1; }
    if (col >= chips(row, side)) { if (side === "a" || !chips(row, "a")) return; side = "a"; col = 0; }
  } else {
    const step = key === "ArrowDown" ? 1 : -1;
    do { row += step; if (row < 0 || row >= layers.length) return; app.revealLayer(row); }
    while (!chips(row, side));
    col = Math.min(col, chips(row, side) - 1);
  }
  app.cursor = `${side}${row}.${col}`;
  app.revealLayer(row);
  const chip = document.querySelector(`[data-at="${app.cursor}"]`);
  if (chip) chip.focus({ preventScroll: true });
}

function keys(event) {
  const typing = event.target.matches("input[type=search]");
  // Many keyboards have brackets behind AltGr, which looks like Ctrl and Alt, or behind Option.
  const bracket = event.altKey && "[]".includes(event.key);
  if (event.metaKey || ((event.ctrlKey || event.altKey) && !bracket)) return;
  if (event.key === "Escape") { app.clear(); event.target.blur(); return; }
  if (typing) return;
  if (event.key === "/") { $("search").focus(); event.preventDefault(); }
  else if (event.key === "[") app.toStop(app.stop - 1);
  else if (event.key === "]") app.toStop(app.stop + 1);
  else if (TABS[Number(event.key) - 1]) app.openTab(TABS[Number(event.key) - 1][0]);
  else if (event.key.startsWith("Arrow") && app.tab === "picture" && event.target.id !== "slider") {
    move(event.key);
    event.preventDefault();
  }
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
