// Chips: a node of a lane each, in the colour of the value that it belongs to.

const HUES = 6;

function chip(app, stage, name, text, classes, at, nodes = [name]) {
  const node = stage.byName.get(name);
  const hit = app.query && nodes.some((one) => app.hitNames.has(one)) && app.nodeStage() === stage;
  const chosen = nodes.includes(app.node) && app.nodeStage() === stage;
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
