// The picture: a lane per layer, what it called before at the left, what it holds at the stage of
// the slider at the right, and the one node between them. Lanes have fixed places, so nothing is
// laid out; only those in sight are in the document.

function drawLanes(app, view) {
  const { story } = app.data;
  const stage = app.rightStage();
  const early = !stage || isEarly(stage.name);
  const picture = el("div", { class: "picture" });
  const map = el("canvas", { class: "map", "aria-hidden": "true" });
  const rows = el("div", { class: "rows" });
  const scroller = el("div", { class: "scroller", tabindex: -1 }, rows);
  const edges = svg("svg", { class: "edges", "aria-hidden": "true" });
  const middle = middleBox(app, early);
  const above = el("div", { class: "more above" });
  const below = el("div", { class: "more below" });
  picture.append(edges, scroller, middle.box, map, above, below);
  view.append(heads(app, stage), picture);

  const layers = story.layers;
  app.layerPrefix = sharedPrefix(layers.map((layer) => layer.name));
  if (!layers.length) rows.append(el("p", { class: "empty" }, emptyReason(app)));
  const bands = placeBands(app, stage);
  const strip = el("div", { class: "strip" });
  const banded = bands.length || wholeCalls(app);
  rows.classList.toggle("banded", Boolean(banded));
  let height = 30;

  const layout = () => {
    height = Math.max(30, Math.min(46, Math.floor(picture.clientHeight / Math.max(layers.length, 1))));
    rows.style.height = `${layers.length * height}px`;
    const wanted = Math.max(layers.length * height, middle.needs() + 20);
    middle.box.style.height = `${Math.min(picture.clientHeight, wanted) - 20}px`;
    draw();
  };
  const draw = () => {
    if (!layers.length) return;
    const top = scroller.scrollTop, seen = picture.clientHeight;
    const first = Math.max(0, Math.floor(top / height) - 2);
    const last = Math.min(layers.length, Math.ceil((top + seen) / height) + 2);
    const { at, piece } = document.activeElement ? document.activeElement.dataset : {};
    const focused = at ? `[data-at="${at}"]` : piece ? `[data-piece="${piece}"]` : "";
    rows.replaceChildren();
    for (let i = first; i < last; i++) {
      const row = laneRow(app, layers[i], i, stage);
      row.style.top = `${i * height}px`;
      row.style.height = `${height}px`;
      rows.append(row);
    }
    if (banded) {
      drawBands(app, strip, bands, height, first, last);
      rows.append(strip);
    }
    if (focused) rows.querySelector(focused)?.focus({ preventScroll: true });
    const { list } = middle;
    list.classList.toggle("goes-on", list.scrollTop + list.clientHeight < list.scrollHeight - 2);
    drawEdges(app, picture, edges, middle, stage, early);
    drawMap(app, map, top, seen, height, stage);
    const hiddenAbove = Math.round(top / height);
    const hiddenBelow = Math.max(0, layers.length - Math.round((top + seen) / height));
    above.textContent = hiddenAbove ? `▲ ${plural(hiddenAbove, "layer")} above` : "";
    below.textContent = hiddenBelow ? `▼ ${plural(hiddenBelow, "layer")} below` : "";
  };
  scroller.addEventListener("scroll", () => { app.scroll = scroller.scrollTop; draw(); });
  middle.list.addEventListener("scroll", draw);
  middle.box.addEventListener("wheel", (event) => {
    if (middle.list.scrollHeight <= middle.list.clientHeight) scroller.scrollTop += event.deltaY;
  }, { passive: true });
  map.addEventListener("click", (event) => {
    scroller.scrollTop = (event.offsetY / map.clientHeight) * rows.clientHeight - picture.clientHeight / 2;
  });
  new ResizeObserver(layout).observe(picture);
  layout();
  if (app.scroll) scroller.scrollTop = app.scroll;
  app.revealLayer = (i) => {
    const y = i * height;
    if (y < scroller.scrollTop || y + height > scroller.scrollTop + picture.clientHeight) {
      scroller.scrollTop = y - picture.clientHeight / 2;
    }
    draw();
  };
  app.redrawLanes = () => {
    middle.mark();
    draw();
  };
}

// What all layers' names begin with, up to a dot: "model.layers." of "model.layers.0".
function sharedPrefix(names) {
  let prefix = names.length > 1 ? names[0] : "";
  for (const name of names) {
    while (!name.startsWith(prefix)) prefix = prefix.slice(0, -1);
  }
  return prefix.slice(0, prefix.lastIndexOf(".") + 1);
}

function emptyReason(app) {
  if (!app.data.stages.length) return "No stages: see the report at the right.";
  return "No KV store, attention call or translation in this graph.";
}

function heads(app, stage) {
  const { story, report } = app.data;
  const calls = report.translations_found || 0;
  const nodes = report.translation_nodes || 0;
  const before = app.data.stage(story.before);
  return el("div", { class: "heads" },
    el("div", {}, el("b", {}, "Before"), before
      ? ` (${before.name}) ${calls ? plural(calls, "translation") : ""}` : " not recorded"),
    el("div", { class: "mid" }, el("b", {}, "Prologue")),
    el("div", {}, el("b", {}, isEarly(stage ? stage.name : "functional") ? "Stage" : "After"),
      stage ? ` (${stage.name}) ${isEarly(stage.name) ? "as it came" : plural(nodes, "translation node")}` : ""));
}

function laneRow(app, layer, i, stage) {
  const before = app.data.stage(app.data.story.before);
  const old = (before && layer.stages[before.name]) || { calls: [], anchors: [] };
  const now = (stage && layer.stages[stage.name]) || { calls: [], anchors: [] };
  const left = el("div", { class: "left" });
  old.calls.forEach((call, k) => left.append(chip(app, before, call.node,
    shortTarget(before.byName.get(call.node).target), `call ${hueOf(app, call.value)}`, `b${i}.${k}`)));
  if (!old.calls.length) left.append(el("span", { class: "none" }, before ? "no translation" : ""));
  const right = el("div", { class: "right" });
  now.calls.forEach((call, k) => right.append(chip(app, stage, call.node,
    shortTarget(stage.byName.get(call.node).target).replace(/^translate_/, "⇄ "), `call ${hueOf(app, call.value)}`, `a${i}.${k}`)));
  foldStores(now.anchors).forEach((anchor, k) => {
    const hue = anchor.values.length ? hueOf(app, anchor.values[0]) : "plain";
    const text = anchor.count > 1 ? `${anchor.label(stage)} ×${anchor.count}` : anchor.label(stage);
    right.append(chip(app, stage, anchor.node, text, `anchor ${anchor.kind} ${hue}`,
      `a${i}.${now.calls.length + k}`, anchor.nodes));
  });
  return el("div", { class: `lane${i % 2 ? " odd" : ""}` },
    left, el("div", { class: "name", title: layer.name }, layer.name.slice(app.layerPrefix.length)),
    right);
}
