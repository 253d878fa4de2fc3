// The strip at the far left: the whole model, and which part of it is in sight.

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
