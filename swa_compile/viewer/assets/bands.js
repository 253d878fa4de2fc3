// The pieces that Inductor cut the graph into, as bands beside the lanes, with the operators at which
// it was cut between them; and a bar along all of them where whole calls were captured.

const GAP = 6; // between two bands, for the operator

// Of each piece, from where to where it reaches, in lanes; of each operator, where it stands. []
// where no operator belongs to a layer, and at stages that the pieces were not cut from.
function placeBands(app, stage) {
  const { story, stages } = app.data;
  const late = stage && (["lowered", "fused", "final"].includes(stage.name) || stages.length === 1);
  if (!late || !story.layers.length) return [];
  const cutsOf = new Map();
  for (const item of story.pieces) {
    if (item.layer !== undefined) cutsOf.set(item.layer, (cutsOf.get(item.layer) || 0) + 1);
  }
  if (!cutsOf.size) return [];
  const seen = new Map();
  const bands = story.pieces.map((item) => {
    if (item.layer === undefined) return { ...item };
    const nth = (seen.get(item.layer) || 0) + 1;
    seen.set(item.layer, nth);
    return { ...item, at: item.layer + nth / (cutsOf.get(item.layer) + 1) };
  });
  // What has no place of its own shares what is left between those that have one, evenly.
  let from = 0, waiting = [];
  const share = (to) => {
    const pieces = waiting.filter((band) => band.piece !== undefined);
    pieces.forEach((band, k) => Object.assign(band, {
      top: from + ((to - from) * k) / pieces.length, bottom: from + ((to - from) * (k + 1)) / pieces.length,
    }));
    waiting.filter((band) => band.piece === undefined).forEach((band) => { band.at = undefined; });
    from = to;
    waiting = [];
  };
  for (const band of bands) {
    if (band.at !== undefined && band.at >= from) share(band.at);
    else waiting.push(band);
  }
  share(story.layers.length);
  return bands;
}

function bandTitle(app, band) {
  const said = [`piece ${band.piece} of Inductor's code`];
  const state = pieceState(app, band.piece);
  if (state) said.push(state);
  return said.join(": ");
}

function drawBands(app, strip, bands, height, first, last) {
  const whole = wholeCalls(app);
  const parts = [];
  if (whole) {
    const bar = el("div", { class: "whole", title: `whole calls in one CUDA graph: ${whole}` });
    Object.assign(bar.style, { top: "2px", height: `${app.data.story.layers.length * height - 4}px` });
    parts.push(bar);
  }
  let drawn = 0;
  for (const band of bands) {
    if (band.piece === undefined) {
      if (band.at === undefined || band.at < first || band.at > last) continue;
      const cut = el("button", {
        class: `cut${app.node && app.node === band.node ? " chosen" : ""}`, type: "button", tabindex: -1,
        title: `${band.operator}, between two pieces`, "data-node": band.node, "aria-label": band.operator,
        onclick: () => app.choose(band.node, app.rightStage().name),
      });
      cut.style.top = `${band.at * height - 2}px`;
      parts.push(cut);
      continue;
    }
    if (band.bottom < first || band.top > last) continue;
    const chosen = app.piece === band.piece;
    const label = el("span", {}, `P${band.piece}`);
    const box = el("button", {
      class: `band ${captureKind(app, band.piece)}${chosen ? " chosen" : ""}`, type: "button",
      "data-piece": band.piece, tabindex: chosen || !drawn++ ? 0 : -1,
      title: bandTitle(app, band), onclick: () => app.choosePiece(band.piece),
      onkeydown: (event) => stepBand(app, bands, band, event),
    }, label);
    const top = band.top * height + (band.top > 0 ? GAP / 2 : 1);
    const bottom = band.bottom * height - (band.bottom < app.data.story.layers.length ? GAP / 2 : 1);
    box.classList.toggle("thin", bottom - top < 15);
    Object.assign(box.style, { top: `${top}px`, height: `${Math.max(3, bottom - top)}px` });
    parts.push(box);
  }
  strip.replaceChildren(...parts);
}

// Up and down among the bands, for who came here by keyboard.
function stepBand(app, bands, band, event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  const pieces = bands.filter((item) => item.piece !== undefined);
  const to = pieces[pieces.indexOf(band) + step];
  event.preventDefault();
  event.stopPropagation();
  if (!to) return;
  app.choosePiece(to.piece);
  app.revealLayer(Math.min(Math.floor(to.top), app.data.story.layers.length - 1));
  document.querySelector(`[data-piece="${to.piece}"]`)?.focus({ preventScroll: true });
}
