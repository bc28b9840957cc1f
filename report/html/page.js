"use strict";
(() => {
  const root = document.documentElement;
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const figures = read("figures");
  const mesh = read("mesh-data");
  const variable = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // ---------------------------------------------------------------- figures

  /* "var:--name" becomes the theme's colour, "hue:0.3" a place on a scale. */
  const resolve = (value) => {
    if (typeof value === "string") {
      if (value.startsWith("var:")) return variable(value.slice(4));
      if (value.startsWith("hue:")) return `hsl(${215 + 120 * Number(value.slice(4))}, 60%, 52%)`;
      return value;
    }
    if (Array.isArray(value)) return value.length > 64 ? value : value.map(resolve);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolve(item)]));
    }
    return value;
  };
  /* A trace given as spans becomes one line with a gap after each span. */
  const strung = ({ spans, ...trace }) => {
    if (!spans) return trace;
    const [x, y, customdata] = [[], [], []];
    spans.forEach(([rank, start, end, stage, microbatch]) => {
      x.push(start, (start + end) / 2, end, null);
      y.push(rank, rank, rank, null);
      customdata.push([stage, microbatch], [stage, microbatch], [stage, microbatch], null);
    });
    return { ...trace, x, y, customdata };
  };
  /* Memory over the step of one stage, by kind: what it always holds, its activations on top. */
  const stacked = ({ data, kinds, shown }) => {
    const line = data[shown];
    const floor = kinds[shown].reduce((sum, [, size]) => sum + size, 0);
    const area = (name, y, color, template) => ({
      type: "scatter", mode: "lines", stackgroup: "kinds", name, x: line.x, y, line: { width: 0, shape: "hv" },
      fillcolor: color, hovertemplate: `${name}: ${template} GiB<extra></extra>`,
    });
    return [
      ...kinds[shown].map(([name, size, number]) => area(name, line.x.map(() => size), variable(name === "upper band" ? "--soft" : `--k${number}`), size.toFixed(1))),
      area("activations", line.y.map((y) => Math.max(0, y - floor)), variable("--k3"), "%{y:.1f}"),
    ];
  };
  const axis = (given) => ({
    gridcolor: variable("--line"), zerolinecolor: variable("--line"), automargin: true, ...given,
  });
  const draw = (name) => {
    const place = document.getElementById(`plot-${name}`);
    if (!place) return;
    const { data, layout } = resolve(figures[name]);
    const traces = figures[name].shown >= 0 ? stacked(figures[name]) : data.map(strung);
    Plotly.react(place, traces, {
      ...layout,
      xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis),
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: variable("--ink") },
      hoverlabel: { bgcolor: variable("--card"), bordercolor: variable("--line"), font: { color: variable("--ink") } },
      margin: { l: 10, r: 12, t: 10, b: 10 },
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", // a finger scrolls the page
    }, { responsive: true, displaylogo: false, displayModeBar: false });
  };
  const drawAll = () => window.Plotly && Object.keys(figures).forEach(draw);
  const onClick = () => document.getElementById("plot-explored")?.on("plotly_click", ({ points }) => {
    const [plan, choices, reason] = points[0].customdata;
    document.getElementById("lost").textContent = `${plan}\n${choices}\n${reason}`;
  });

  document.querySelectorAll("button.window").forEach((button) => button.addEventListener("click", () => {
    Plotly.relayout("plot-timeline", { "xaxis.range": [...figures.timeline.windows[button.dataset.window]] });
  }));
  const stages = [...document.querySelectorAll("button.stage")];
  stages.forEach((button, index) => button.addEventListener("click", () => {
    stages.forEach((other) => { other.ariaPressed = String(other === button); });
    figures["memory-time"].shown = index - 1;
    draw("memory-time");
  }));

  /* The text can be read and the mesh used at once; figures follow, one at a time. */
  const later = window.requestIdleCallback || ((task) => setTimeout(task, 1));
  const startFigures = () => {
    if (!window.Plotly) {
      const library = document.createElement("script");
      library.textContent = document.getElementById("plotly").textContent;
      document.head.append(library);
    }
    const drawNext = ([name, ...rest]) => {
      if (!name) { onClick(); root.dataset.ready = "true"; return; }
      draw(name);
      later(() => drawNext(rest));
    };
    drawNext(Object.keys(figures));
  };
  if (Object.keys(figures).length) addEventListener("load", () => requestAnimationFrame(() => setTimeout(startFigures, 0)));
  else root.dataset.ready = "true";

  // ---------------------------------------------------------------- light and dark

  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    drawAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  matchMedia("print").addEventListener("change", drawAll);
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((item) => { item.open = true; }));

  // ---------------------------------------------------------------- the mesh

  const nodes = document.querySelector(".nodes");
  const devices = [...document.querySelectorAll("[data-rank]")];
  const buttons = [...document.querySelectorAll("button.axis")];
  const at = (rank) => Object.fromEntries(mesh.order.map((name) => [name, Math.floor(rank / mesh.strides[name]) % mesh.sizes[name]]));
  const shown = () => buttons.find((button) => button.ariaPressed === "true")?.dataset.axis;
  const hue = (place, size) => (size > 1 ? 250 + (place * 300) / size : 250);
  const paint = () => {
    const name = shown();
    if (!name) return;
    devices.forEach((device) => device.style.setProperty("--hue", hue(at(Number(device.dataset.rank))[name], mesh.sizes[name])));
  };
  buttons.forEach((button) => button.addEventListener("click", () => {
    buttons.forEach((other) => { other.ariaPressed = String(other === button); });
    paint();
    if (selected) point(selected);
  }));
  let selected = null;
  const sameGroup = (a, b, name) => mesh.order.every((other) => other === name || a[other] === b[other]);
  const point = (device) => {
    selected = device;
    const rank = Number(device.dataset.rank);
    const here = at(rank);
    const name = shown();
    nodes.classList.add("focus");
    devices.forEach((other) => {
      other.classList.toggle("here", other === device);
      other.classList.toggle("peer", other !== device && Boolean(name) && sameGroup(here, at(Number(other.dataset.rank)), name));
    });
    const stage = mesh.stages[here.pp];
    const places = mesh.order.filter((other) => mesh.sizes[other] > 1).map((other) => `${other} ${here[other]}`).join(", ");
    const group = name ? `Outlined: its ${name} group of ${mesh.sizes[name]}, which talks over ${mesh.over[name]}.` : "";
    document.getElementById("device").textContent =
      `Rank ${rank}${places ? `: ${places}` : ""}. ${group}\nStage ${here.pp}: ${stage.layers} (${stage.blocks}), ${stage.peak}.`;
  };
  const leave = () => {
    nodes.classList.remove("focus");
    devices.forEach((device) => device.classList.remove("here", "peer"));
  };
  nodes.addEventListener("pointerover", ({ target }) => { if (target.dataset.rank) point(target); });
  nodes.addEventListener("click", ({ target }) => { if (target.dataset.rank) point(target); });
  nodes.addEventListener("focusin", ({ target }) => { if (target.dataset.rank) point(target); });
  nodes.addEventListener("pointerleave", leave);
  paint();

  // ---------------------------------------------------------------- commands

  document.querySelectorAll("button.copy").forEach((button) => button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(button.parentElement.querySelector("code").textContent);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }));
})();
