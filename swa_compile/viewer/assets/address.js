// The page's address holds what is shown, for reloading and for the browser's back and forward.

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
