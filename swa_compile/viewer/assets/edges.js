// The edges of the picture: from each call into its value, and from a value to what it feeds.

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
