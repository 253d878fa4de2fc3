// Light, dark, or as the system has it.

function theme(app) {
  const modes = ["system", "light", "dark"];
  const root = document.documentElement;
  let mode = "system";
  try { mode = localStorage.getItem("swa-theme") || mode; } catch { /* a file may have no storage */ }
  const set = () => {
    root.dataset.theme = mode;
    $("theme").textContent = mode;
    try { localStorage.setItem("swa-theme", mode); } catch { /* as above */ }
    if (app.data) app.redrawLanes();
  };
  $("theme").addEventListener("click", () => {
    mode = modes[(modes.indexOf(mode) + 1) % modes.length];
    set();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => app.redrawLanes());
  set();
}
