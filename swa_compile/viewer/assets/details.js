// The panel at the right: the report, or the node that was chosen, or what was searched for.

function drawDetails(app) {
  const panel = $("details");
  panel.replaceChildren();
  if (app.query) return drawResults(app, panel);
  const stage = app.nodeStage();
  const node = app.node && stage && stage.byName.get(app.node);
  if (node) return drawNode(app, panel, stage, node);
  if (app.value !== null) return drawValue(app, panel, app.data.story.values[app.value]);
  if (app.piece !== null) return drawPiece(app, panel);
  drawReport(app, panel);
}

function fact(name, ...value) {
  return value.some((v) => v !== "" && v !== null && v !== undefined)
    ? el("div", { class: "fact" }, el("dt", {}, name), el("dd", {}, ...value)) : null;
}

function nodeLink(app, stage, name) {
  const node = stage.byName.get(name);
  const about = node ? typeOf(node) : "";
  const user = stage.name !== "captured" && app.data.story.inputs[name];
  return el(
    "button", { class: "link", type: "button", onclick: () => app.choose(name, stage.name) },
    el("span", {}, user || name), about ? el("small", {}, ` ${about}`) : null,
  );
}

function linkList(app, stage, names) {
  const shown = names.slice(0, 60).map((name) => el("li", {}, nodeLink(app, stage, name)));
  if (names.length > 60) shown.push(el("li", { class: "faint" }, `and ${names.length - 60} more`));
  return shown.length ? el("ul", { class: "links" }, shown) : null;
}

function drawNode(app, panel, stage, node) {
  const layer = app.data.layerOf.get(`${stage.name} ${node.name}`);
  const line = linesOf(stage).get(node.name);
  const user = stage.name !== "captured" ? app.data.story.inputs[node.name] : "";
  panel.append(
    el("p", { class: "eyebrow" }, `${node.kind.replace("_", " ")} · ${stage.name}`,
      node.prologue ? " · prologue" : ""),
    el("h2", {}, user || node.name),
    el("dl", {},
      fact("node", user ? node.name : ""),
      fact("operator", node.op === "call_function" ? node.target : ""),
      fact("value", typeOf(node), node.device ? ` on ${node.device}` : ""),
      fact("layer", layer === undefined ? "" : app.data.story.layers[layer].name),
      fact("module", node.module || ""),
      fact("source", node.source ? el("code", {}, node.source) : ""),
      fact(node.kind === "store" ? "writes" : "cache",
        (node.caches || []).map((c) => app.data.story.inputs[c] || c).join(", "))),
  );
  const value = app.data.story.values.findIndex((v) => v.node === node.name || v.calls.includes(node.name));
  const refusal = value >= 0 && stage.name !== "captured" && app.data.story.values[value];
  if (refusal && refusal.code) panel.append(refusalBox(app, refusal));
  if (line !== undefined) {
    panel.append(el("h3", {}, "Code"),
      el("pre", { class: "snippet" }, stage.lines[line].trim().replace(/;\s+\w+ = None.*$/, "")),
      el("button", { class: "link", type: "button", onclick: () => app.openTab("code") },
        `line ${line + 1} of ${stage.file}`));
  }
  const stack = node.stack === undefined ? "" : app.data.graph.stacks[node.stack];
  if (stack) panel.append(el("h3", {}, "Source"), stackView(stack, node.source || ""));
  const inputs = [...new Set(node.args || [])];
  const users = usersOf(stage).get(node.name) || [];
  if (inputs.length) panel.append(el("h3", {}, `Reads ${inputs.length}`), linkList(app, stage, inputs));
  if (users.length) panel.append(el("h3", {}, `Used by ${users.length}`), linkList(app, stage, users));
}

// The innermost frames first: that is where one looks.
function stackView(stack, own) {
  const frames = [];
  for (const line of stack.split("\n")) {
    const match = /^\s*File "(.*)", line (\d+), in (.*)$/.exec(line);
    if (match) frames.push({ path: match[1], line: match[2], name: match[3], code: [] });
    else if (frames.length && /[^\s^~]/.test(line)) frames[frames.length - 1].code.push(line.trim());
  }
  if (!frames.length) return el("pre", { class: "snippet" }, stack);
  return el("ol", { class: "stack" }, frames.reverse().map((frame) => el("li",
    { class: `${frame.path}:${frame.line}` === own ? "own" : "" },
    el("span", { class: "where", title: `${frame.path}:${frame.line}` },
      `${frame.path.split("/").slice(-2).join("/")}:${frame.line}`),
    el("span", { class: "faint" }, ` ${frame.name}`),
    frame.code.length ? el("pre", {}, frame.code.join("\n")) : null)));
}

function refusalBox(app, refusal) {
  return el("div", { class: "refusal" },
    el("b", {}, refusal.code),
    el("p", {}, refusal.message),
    refusal.refused_at || refusal.source
      ? el("p", {}, el("code", {}, refusal.refused_at || refusal.source)) : null,
    app.data.advice[refusal.code]
      ? el("p", { class: "advice" }, `What to do: ${app.data.advice[refusal.code]}`) : null);
}

function drawValue(app, panel, value) {
  const shown = app.rightStage();
  const held = (value.nodes[shown.name] || []).filter((name) => shown.byName.has(name));
  const before = app.data.stage(app.data.story.before);
  panel.append(
    el("p", { class: "eyebrow" }, value.code ? "refused value" : "value of the one node"),
    el("h2", {}, value.loc),
    el("dl", {},
      fact("through", value.mapping),
      fact("ids", `${SHORT[value.dtype] || value.dtype}[${value.shape.join(", ")}]`),
      fact("gives", `i64[${value.shape.join(", ")}]`),
      fact("calls", `${value.uses} merged`),
      fact("source", value.source ? el("code", {}, value.source) : "")),
  );
  if (value.code) panel.append(refusalBox(app, value));
  if (held.length) panel.append(el("h3", {}, `In ${shown.name}`), linkList(app, shown, held));
  if (before && value.calls.length) {
    panel.append(el("h3", {}, `Calls in ${before.name}`), linkList(app, before, value.calls));
  }
}

function drawReport(app, panel) {
  const { report, story } = app.data;
  panel.append(el("p", { class: "eyebrow" }, "report"), el("h2", {}, "This graph"));
  if (app.data.texts["error.txt"]) {
    panel.append(el("div", { class: "refusal" }, el("b", {}, "A pass raised"),
      el("pre", { class: "snippet" }, app.data.texts["error.txt"].trim().split("\n").slice(-3).join("\n"))));
  }
  if (report.from_cache) {
    panel.append(el("div", { class: "note" }, el("b", {}, "From the compile cache"),
      el("p", {}, "The passes did not run in this process, so there are no stages of theirs: only "
        + "Dynamo's graph, Inductor's code, and the report, which travels with the code. For the "
        + "stages compile with an empty cache (TORCHINDUCTOR_FORCE_DISABLE_CACHES=1).")));
  }
  if (app.data.graph.omitted) {
    panel.append(el("div", { class: "note" },
      `Too large for the bound of a dump's file, left out: ${app.data.graph.omitted.join(", ")}`));
  }
  const refused = report.refused || [];
  if (refused.length) {
    panel.append(el("h3", { class: "warn" }, `Refused ${refused.length}`));
    for (const r of refused) panel.append(refusalBox(app, { ...r, refused_at: r.source }));
  }
  const number = (n) => (n === null || n === undefined ? "" : String(n));
  panel.append(el("dl", { class: "wide" },
    fact("index computations moved or merged", number(report.invariants_hoisted)),
    fact("kernel calls that read the mapping", number(report.mapping_kernels)),
    fact("cache-sized buffers in the code", number(report.cache_copies)),
    fact("partitions", number(report.partitions)),
    fact("layers told apart by", story.layers.length ? story.rule : "")));
  drawCaptures(app, panel);
  panel.append(el("h3", {}, "Keys"), el("ul", { class: "keys" },
    [["/", "search"], ["Esc", "back to this"], ["[ ]", "stage before, after"], ["1-6", "views"],
      ["arrows", "move through the lanes"], ["Enter", "choose"]].map(
      ([key, what]) => el("li", {}, el("kbd", {}, key), ` ${what}`))));
}

const HITS = 300;

function search(stage, query, inputs) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  return stage.nodes.filter((node) => {
    const text = `${node.name} ${node.target} ${node.kind} ${node.module || ""} ${node.source || ""} ${
      inputs[node.name] || ""} ${typeOf(node)}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
}

function drawResults(app, panel) {
  const stage = app.nodeStage();
  const hits = app.hits;
  panel.append(el("p", { class: "eyebrow" }, `search · ${stage ? stage.name : ""}`),
    el("h2", { id: "hits" }, plural(hits.length, "node")));
  panel.append(el("ul", { class: "links results" }, hits.slice(0, HITS).map((node, i) =>
    el("li", { class: i === app.hit ? "current" : "" }, nodeLink(app, stage, node.name),
      el("small", { class: "faint" }, ` ${shortTarget(node.target)}`)))));
  if (hits.length > HITS) panel.append(el("p", { class: "faint" }, `and ${hits.length - HITS} more`));
  const current = panel.querySelector(".current");
  if (current) current.scrollIntoView({ block: "nearest" });
}
