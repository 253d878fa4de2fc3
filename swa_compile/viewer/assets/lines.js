// A text of any length: only the lines in sight are in the document.

const LINE = 18;

function lineView(lines, { mark = -1, kindOf = () => "", click = null } = {}) {
  const body = el("div", { class: "lines-body" });
  const box = el("div", { class: "lines", tabindex: 0 }, body);
  let widest = 0;
  for (const line of lines) widest = Math.max(widest, line.length);
  const digits = String(lines.length).length;
  body.style.height = `${lines.length * LINE}px`;
  body.style.width = `calc(${Math.min(widest, 4000) + digits + 4}ch + 24px)`;
  let shown = "";
  const draw = () => {
    const first = Math.max(0, Math.floor(box.scrollTop / LINE) - 10);
    const last = Math.min(lines.length, first + Math.ceil(box.clientHeight / LINE) + 20);
    if (shown === `${first} ${last}`) return;
    shown = `${first} ${last}`;
    body.replaceChildren();
    for (let i = first; i < last; i++) {
      const row = el(
        "div", { class: `line ${kindOf(lines[i], i)}${i === mark ? " marked" : ""}` },
        el("span", { class: "number", style: `width:${digits + 1}ch` }, String(i + 1)),
        el("span", { class: "text" }, lines[i] || " "),
      );
      row.style.top = `${i * LINE}px`;
      if (click) row.addEventListener("click", () => click(i));
      body.append(row);
    }
  };
  box.addEventListener("scroll", draw);
  new ResizeObserver(() => { shown = ""; draw(); }).observe(box);
  box.show = (line) => {
    box.scrollTop = Math.max(0, line * LINE - box.clientHeight / 3);
    draw();
  };
  if (mark >= 0) requestAnimationFrame(() => box.show(mark));
  return box;
}

const diffKind = (line) =>
  line.startsWith("@@") ? "hunk"
    : line.startsWith("+++") || line.startsWith("---") ? "file"
      : line.startsWith("+") ? "added"
        : line.startsWith("-") ? "removed" : "";
