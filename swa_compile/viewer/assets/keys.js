// The keyboard.

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
  else if (event.key.startsWith("Arrow") && app.tab === "picture" && !event.target.closest("#slider, #details")) {
    move(event.key);
    event.preventDefault();
  }
}
