// The picture: a lane per layer, what it called before at the left, what it holds at the stage of
// the slider at the right, and the one node between them. Lanes have fixed places, so nothing is
// laid out; only those in sight are in the document.

const HUES = 6;

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
  const bands = partitionBands(app, stage);
  let height = 30;

  const layout = () => {
    height = Math.max(30, Math.min(46, Math.floor(picture.clientHeight / Math.max(layers.length, 1))));
    rows.style.height = `${layers.length * height}px`;
    middle.box.style.height = `${Math.min(picture.clientHeight, Math.max(layers.length * height, 360)) - 20}px`;
    draw();
  };
  const draw = () => {
    if (!layers.length) return;
    const top = scroller.scrollTop, seen = picture.clientHeight;
    const first = Math.max(0, Math.floor(top / height) - 2);
    const last = Math.min(layers.length, Math.ceil((top + seen) / height) + 2);
    const focused = document.activeElement && document.activeElement.dataset
      ? document.activeElement.dataset.at : undefined;
    rows.replaceChildren();
    for (let i = first; i < last; i++) {
      const row = laneRow(app, layers[i], i, stage, bands[i]);
      row.style.top = `${i * height}px`;
      row.style.height = `${height}px`;
      rows.append(row);
    }
    if (focused) rows.querySelector(`[data-at="${focused}"]`)?.focus({ preventScroll: true });
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

function chip(app, stage, name, text, classes, at) {
  const node = stage.byName.get(name);
  const hit = app.query && app.hitNames.has(name) && app.nodeStage() === stage;
  const chosen = app.node === name && app.nodeStage() === stage;
  return el("button", {
    class: `chip ${classes}${hit ? " hit" : ""}${chosen ? " chosen" : ""}${app.query && !hit ? " dim" : ""}`,
    type: "button", "data-node": name, "data-stage": stage.name, "data-at": at,
    tabindex: app.cursor === at ? 0 : -1,
    title: node ? `${name}: ${node.target} ${typeOf(node)}` : name,
    "aria-label": node ? `${text}, node ${name}, ${typeOf(node)}` : name,
    onclick: () => { app.cursor = at; app.choose(name, stage.name); },
  }, text);
}

const hueOf = (app, value) =>
  value === null || value === undefined ? "plain"
    : app.data.story.values[value].code ? "refused" : `hue${value % HUES}`;

function laneRow(app, layer, i, stage, band) {
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
      `a${i}.${now.calls.length + k}`));
  });
  if (band !== undefined && band !== null) {
    right.append(el("span", { class: `band ${band % 2 ? "odd" : "even"}`,
      title: `partition ${band} of Inductor's code ends at this layer's attention` }, `P${band}`));
  }
  return el("div", { class: `lane${i % 2 ? " odd" : ""}${band === undefined ? "" : " banded"}` },
    left, el("div", { class: "name", title: layer.name }, layer.name.slice(app.layerPrefix.length)),
    right);
}

// K's and V's write of one layer are one chip with a count.
function foldStores(anchors) {
  const folded = [];
  for (const anchor of anchors) {
    const last = folded[folded.length - 1];
    const same = last && anchor.kind === "store" && last.kind === "store"
      && String(last.values) === String(anchor.values);
    if (same) { last.count++; last.nodes.push(anchor.node); continue; }
    folded.push({
      ...anchor, count: 1, nodes: [anchor.node],
      label(stage) { return shortTarget(stage.byName.get(this.node).target); },
    });
  }
  return folded;
}

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
  return { box, list, mark };
}

function drawEdges(app, picture, edges, middle, stage, early) {
  const base = picture.getBoundingClientRect();
  const clip = middle.list.getBoundingClientRect();
  edges.replaceChildren();
  edges.setAttribute("width", base.width);
  edges.setAttribute("height", base.height);
  const port = new Map();
  for (const button of middle.list.querySelectorAll(".value")) {
    const box = button.getBoundingClientRect();
    const y = Math.max(clip.top + 4, Math.min(clip.bottom - 4, (box.top + box.bottom) / 2));
    port.set(Number(button.dataset.value), { left: box.left, right: box.right, y });
  }
  const { story } = app.data;
  // Bent only in the gaps beside the middle: behind the chips of a lane an edge runs straight.
  const line = (x1, y1, x2, y2, hue, strong) => {
    const [gapLeft, gapRight] = x1 < clip.left ? [clip.left - 34, x2] : [x1, clip.right + 34];
    const [start, a, b] = [x1 - base.left, Math.max(x1, gapLeft) - base.left, y1 - base.top];
    const [end, c, d] = [x2 - base.left, Math.min(x2, gapRight) - base.left, y2 - base.top];
    const dx = (c - a) * 0.5;
    edges.append(svg("path", {
      d: `M${start},${b} H${a} C${a + dx},${b} ${c - dx},${d} ${c},${d} H${end}`, class: `edge ${hue}${strong ? " strong" : ""}`,
    }));
  };
  const wanted = app.value !== null && !app.node ? app.value : null;
  for (const button of picture.querySelectorAll(".left .chip")) {
    const layer = story.layers[Number(button.dataset.at.slice(1).split(".")[0])];
    const call = (layer.stages[button.dataset.stage] || { calls: [] }).calls
      .find((c) => c.node === button.dataset.node);
    const to = call && port.get(call.value);
    if (!to) continue;
    const box = button.getBoundingClientRect();
    const strong = wanted === call.value || button.classList.contains("chosen");
    line(box.right, (box.top + box.bottom) / 2, to.left, to.y,
      `${hueOf(app, call.value)}${early ? " ghost" : ""}`, strong);
  }
  if (early || !stage) return;
  for (const row of picture.querySelectorAll(".lane")) {
    const label = row.querySelector(".right .chip");
    if (!label) continue;
    const layer = story.layers[Number(label.dataset.at.slice(1).split(".")[0])];
    const lane = layer.stages[stage.name] || { calls: [], anchors: [] };
    const chips = new Map([...row.querySelectorAll(".right .chip")].map((c) => [c.dataset.node, c]));
    for (const anchor of foldStores(lane.anchors)) {
      for (const value of anchor.values) {
        const from = port.get(value), target = chips.get(anchor.node);
        if (!from || !target) continue;
        const box = target.getBoundingClientRect();
        // The edge to the second chip passes behind the first.
        line(from.right, from.y, box.left, (box.top + box.bottom) / 2,
          hueOf(app, value), wanted === value || target.classList.contains("chosen"));
      }
    }
  }
}

function drawMap(app, map, top, seen, height, stage) {
  const layers = app.data.story.layers;
  const scale = window.devicePixelRatio || 1;
  const [width, tall] = [map.clientWidth, map.clientHeight];
  if (!width || !tall) return;
  map.width = width * scale;
  map.height = tall * scale;
  const pen = map.getContext("2d");
  pen.scale(scale, scale);
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const step = Math.min(tall / layers.length, height);
  const bar = Math.max(1, Math.min(step - 1, 10));
  const before = app.data.story.before;
  layers.forEach((layer, i) => {
    const calls = (layer.stages[before] || { calls: [] }).calls;
    const y = i * step + (step - bar) / 2;
    const refused = calls.some((c) => c.value !== null && app.data.story.values[c.value].code);
    pen.fillStyle = refused ? color("--warn") : calls.length ? color("--hue0") : color("--line");
    pen.fillRect(3, y, width - 6, bar);
  });
  pen.strokeStyle = color("--faint");
  pen.lineWidth = 1;
  const all = layers.length * height;
  if (all > seen + 1) {
    pen.strokeRect(0.5, (top / all) * tall + 0.5, width - 1, (seen / all) * tall - 1);
  }
}

// Which partition of the generated code ends at each layer's attention call; [] where the code is
// in one piece or its cuts are not these calls.
function partitionBands(app, stage) {
  const { story } = app.data;
  if (!story.partitions.length || !stage || !["lowered", "fused", "final"].includes(stage.name)) return [];
  const ends = [];
  let last = null;
  for (const item of story.partitions) {
    if (typeof item === "number") last = item;
    else ends.push(last);
  }
  const calls = story.layers.map((layer) =>
    ((layer.stages[stage.name] || { anchors: [] }).anchors.filter((a) => a.kind === "attention").length));
  if (calls.some((n) => n > 1) || calls.reduce((a, b) => a + b, 0) !== ends.length) return [];
  let at = 0;
  return calls.map((n) => (n ? ends[at++] : null));
}
