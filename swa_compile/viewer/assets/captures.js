// What was captured of the graph, as far as the dump's captures.json says: at which sizes, as a
// whole or in pieces, and what not.

const sizesOf = (app) => Object.entries((app.data.captures || {}).recorded || {});

// The sizes at which whole calls are one CUDA graph, as text; the first of very many.
function wholeCalls(app) {
  const sizes = sizesOf(app).filter(([, recorded]) => recorded.whole).map(([size]) => size);
  const more = sizes.length - 12;
  return sizes.slice(0, 12).join(", ") + (more > 0 ? ` and ${more} more sizes` : "");
}

// How one piece came out at the sizes that are captured in pieces: "captured", "partly", "not", or
// "open" where there is no such size yet. Counted once: bands are drawn at every step of scrolling.
function captureKind(app, piece) {
  const { data } = app;
  if (!data.capturedAt) {
    data.capturedAt = new Map();
    const inPieces = sizesOf(app).filter(([, recorded]) => !recorded.whole);
    data.sizesInPieces = inPieces.length;
    for (const number of inPieces.flatMap(([, recorded]) => recorded.pieces)) {
      data.capturedAt.set(number, (data.capturedAt.get(number) || 0) + 1);
    }
  }
  const captured = data.capturedAt.get(piece) || 0;
  if (!data.sizesInPieces) return "open";
  return captured === data.sizesInPieces ? "captured" : captured ? "partly" : "not";
}

function pieceState(app, piece) {
  return { captured: "captured", partly: "captured at some sizes", not: "not captured", open: "" }[
    captureKind(app, piece)];
}

function sizeState(app, recorded) {
  if (recorded.whole) return "whole call";
  const { pieces } = app.data.captures;
  if (!recorded.pieces.length) return "not captured";
  return `${recorded.pieces.length} of ${plural(pieces, "piece")}`;
}

const skipBox = (skip) => el("div", { class: "refusal" },
  el("b", {}, skip.code), el("p", {}, skip.message),
  skip.source ? el("p", {}, el("code", {}, skip.source)) : null);

// The dump lists so many sizes and counts the rest.
const furtherSizes = (app) => (app.data.captures.further_sizes
  ? el("p", { class: "faint" }, `and ${plural(app.data.captures.further_sizes, "more size")}`) : "");

function drawCaptures(app, panel) {
  const { captures } = app.data;
  if (app.data.captures_error) {
    panel.append(el("h3", {}, "CUDA graphs"), el("div", { class: "refusal" }, el("p", {}, app.data.captures_error)));
  }
  if (!captures) return;
  const sizes = sizesOf(app);
  panel.append(el("h3", {}, "CUDA graphs"), el("dl", { class: "wide" },
    fact("asked for", captures.mode),
    fact("recorded", String(captures.captures)),
    fact("calls replayed", String(captures.replays)),
    fact("… as one graph", captures.full_replays ? String(captures.full_replays) : ""),
    fact("… as a list of launches", captures.direct_replays ? String(captures.direct_replays) : ""),
    fact("calls without a graph", String(captures.uncaptured)),
    fact("inputs copied", captures.copied_inputs ? String(captures.copied_inputs) : ""),
    fact("captures renewed", captures.recaptured ? String(captures.recaptured) : "")));
  if (sizes.length) {
    panel.append(el("table", { class: "sizes" }, el("tbody", {}, sizes.map(([size, recorded]) => el("tr", {},
      el("td", {}, size), el("td", { class: recorded.whole || recorded.pieces.length ? "" : "bad" },
        sizeState(app, recorded)),
      el("td", { class: "n" }, bytes(captures.memory[size] || 0)))))), furtherSizes(app));
  }
  for (const skip of captures.skipped) panel.append(skipBox(skip));
  if (captures.further_skips) panel.append(el("p", { class: "faint" }, `and ${captures.further_skips} more skips`));
  panel.append(el("p", { class: "faint" }, `${captures.time ? `As of ${captures.time}. ` : ""}A replay writes nothing: the counts are `
    + "brought up to date when something is recorded, when collect() or the process ends."));
}

const bytes = (n) => (n >= 2 ** 20 ? `${(n / 2 ** 20).toFixed(1)} MiB` : n >= 1024 ? `${(n / 1024).toFixed(1)} KiB` : `${n} B`);

// The panel of one piece: from where to where, how it was captured, its kernels, its code.
function drawPiece(app, panel) {
  const { story, code, captures } = app.data;
  const at = story.pieces.findIndex((item) => item.piece === app.piece);
  const piece = story.pieces[at];
  const stage = app.rightStage();
  const end = (item, open) => {
    if (!item) return open;
    if (item.piece !== undefined) return `P${item.piece}`;
    const layer = item.layer === undefined ? "" : ` of ${story.layers[item.layer].name}`;
    return item.node && stage.byName.has(item.node)
      ? el("span", {}, nodeLink(app, stage, item.node), layer) : `${shortTarget(item.operator)}${layer}`;
  };
  const kernels = story.kernels.filter((kernel) => kernel.partition === piece.piece);
  panel.append(el("p", { class: "eyebrow" }, `piece of Inductor's code · partition_${piece.piece}`), el("h2", {}, `P${piece.piece}`),
    el("dl", {},
      fact("behind", end(story.pieces[at - 1], "the start of the graph")),
      fact("up to", end(story.pieces[at + 1], "the end of the graph"))));
  const sizes = sizesOf(app);
  if (captures) {
    panel.append(el("h3", {}, "CUDA graphs"), sizes.length
      ? el("table", { class: "sizes" }, el("tbody", {}, sizes.map(([size, recorded]) => {
        const own = recorded.pieces.includes(piece.piece);
        return el("tr", {}, el("td", {}, size), el("td", { class: recorded.whole || own ? "" : "bad" },
          recorded.whole ? "in the graph of the whole call" : own ? "captured" : "not captured"));
      }))) : el("p", { class: "faint" }, "Nothing was recorded yet."), furtherSizes(app));
    const about = new RegExp(`^piece ${piece.piece} `);
    for (const skip of captures.skipped) if (about.test(skip.message)) panel.append(skipBox(skip));
  }
  panel.append(el("h3", {}, plural(kernels.length, "kernel call")), el("ul", { class: "links" }, kernels.map((kernel) =>
    el("li", {}, el("button", { class: "link mono", type: "button", title: kernel.name,
      onclick: () => app.openKernel(kernel) }, kernel.name.replace(/^torch\.ops\./, "")),
    kernel.mapping ? el("b", { class: "faint" }, " reads the mapping") : null))));
  if (!piece.line) return;
  const lines = code.split("\n").slice(piece.line - 1, piece.end);
  const shown = lines.slice(0, PIECE_LINES).join("\n");
  panel.append(el("h3", {}, "Code"), el("pre", { class: "snippet unwrapped" }, shown,
    lines.length > PIECE_LINES ? `\n… ${lines.length - PIECE_LINES} more lines` : null),
  el("button", { class: "link", type: "button", onclick: () => app.openKernel({ line: piece.line }) },
    `line ${piece.line} of 03-inductor.py`));
}

const PIECE_LINES = 200;
