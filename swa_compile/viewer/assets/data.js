// The data of the page, and what is looked up in them again and again.

async function load() {
  const packed = Uint8Array.from(atob($("data").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const data = JSON.parse(await new Response(stream).text());
  const captures = JSON.parse($("captures").textContent);
  data.captures = captures.recorded ? captures : null;
  return data;
}

function index(data) {
  for (const stage of data.stages) {
    stage.nodes = stage.nodes.map((i) => data.nodes[i]);
    stage.byName = new Map(stage.nodes.map((node) => [node.name, node]));
    stage.text = data.texts[stage.file] || "";
  }
  data.stage = (name) => data.stages.find((stage) => stage.name === name);
  data.layerOf = new Map();
  data.story.layers.forEach((layer, i) => {
    for (const [stage, lane] of Object.entries(layer.stages)) {
      for (const item of [...lane.calls, ...lane.anchors]) {
        data.layerOf.set(`${stage} ${item.node}`, i);
      }
    }
  });
  return data;
}

function usersOf(stage) {
  if (!stage.users) {
    stage.users = new Map();
    for (const node of stage.nodes) {
      for (const arg of new Set(node.args || [])) {
        if (!stage.users.has(arg)) stage.users.set(arg, []);
        stage.users.get(arg).push(node.name);
      }
    }
  }
  return stage.users;
}

// Line numbers (from 0) at which the text of a stage assigns its nodes.
function linesOf(stage) {
  if (!stage.lineOf) {
    stage.lineOf = new Map();
    stage.lines = stage.text.split("\n");
    stage.lines.forEach((line, i) => {
      const match = /^\s+([A-Za-z_]\w*)(?::| =)/.exec(line);
      if (match && !stage.lineOf.has(match[1])) stage.lineOf.set(match[1], i);
    });
  }
  return stage.lineOf;
}

const SHORT = {
  float32: "f32", float16: "f16", bfloat16: "bf16", float64: "f64", int64: "i64", int32: "i32",
  int16: "i16", int8: "i8", uint8: "u8", bool: "b8",
};

function typeOf(node) {
  if (!node.dtype) return node.values ? `tuple of ${node.values}` : "";
  if (node.dtype === "size") return `size ${node.shape}`;
  const shape = node.shape === "scalar" ? "" : (node.shape || []).join(", ");
  return `${SHORT[node.dtype] || node.dtype}[${shape}]`;
}

// A node's target without its namespace and overload, for a chip.
const shortTarget = (target) => target.replace(/^.*::/, "").replace(/\.default$/, "");

const isEarly = (name) => name === "captured" || name === "functional" || name === "lifted";
