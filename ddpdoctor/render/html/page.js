"use strict";
/* Puts the page together. */

function stepsSection(report, series) {
  if (!series || !series.columns) return null;
  const blamed = [...new Set(report.findings.flatMap((found) => found.ranks))];
  const slowest = blamed.find((rank) => series.ranks.includes(rank));
  if (slowest !== undefined) view.rank = slowest;
  const perColumn = Math.round((series.edges[series.columns] - series.edges[0]) / series.columns);
  const lead = (perColumn > 1 ? `Each point is the mean of about ${perColumn.toLocaleString("en")} steps. ` : "")
    + "Drag to zoom, double-click to see the whole run again.";
  const pick = rankPicker(series);
  const own = rankCurves("Own time of ranks", "a step, without waiting for others", series, (place, column) => series.own(place, column), blamed);
  const longest = rankCurves("Longest step", "of each point", series, (place, column) => series.at(place, series.parts.length, column), blamed, { height: 140 });
  const parts = [el("div", { class: "tools" }, "rank", pick, el("button", { onclick: () => view.change({ range: null }) }, "Whole run")), own,
    phaseChart(series, { hint: "of the chosen rank" }), longest];
  if (series.ranks.length > 1) {
    const owns = series.table((place, column) => series.own(place, column));
    const waits = series.table((place, column) => series.wait(place, column));
    parts.push(heatmap("Own time, ranks by steps", "strong colour is slow", series, owns, "cold", "hot"),
      heatmap("Wait, ranks by steps", "strong colour waits for others; the slow rank does not", series, waits, "cold", "backward"));
  }
  return section("steps", "Steps over time", lead, parts);
}

function rankPicker(series) {
  const pick = el("select", { "aria-label": "rank", onchange: () => view.change({ rank: pick.value === "" ? null : Number(pick.value) }) },
    el("option", { value: "" }, "median of all"), series.ranks.map((rank) => el("option", { value: rank }, `${rank}`)));
  const show = () => { pick.value = view.rank === null ? "" : String(view.rank); };
  show();
  view.on(show);
  return pick;
}

function trainingSection(series) {
  if (!series) return null;
  const titles = { loss: "Loss", norm: "Gradient norm" };
  const drawn = Object.keys(series.curves).map((name) => rankCurves(titles[name], name === "norm" ? "as clip_grad_norm_ returned it" : "of each rank's own batches",
    series, (place, column) => series.curve(name, place)[column], [], { format: (value) => value.toPrecision(4), range: (_, low, high) => padded(low, high) }));
  return drawn.length ? section("training", "Loss and gradients", "", drawn) : null;
}

function padded(low, high) {
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
}

/* The losses of several sizes over samples, before what seeds of the smallest size give. */
function curvesSection(report) {
  if (!report.curves) return null;
  const { samples, losses, band } = report.curves;
  const format = (value) => value.toPrecision(4);
  const drawn = chart("Loss", "mean of all ranks in each window", "samples", () => {
    const edges = band ? [band.high, band.low] : [];
    const made = lines(losses.map(([name]) => name), losses.map(([, values]) => values), samples, losses.map((_, place) => place), format);
    edges.forEach((edge, place) => {
      made.data.push(edge);
      made.series.push({ label: `${band.name}, ${place ? "least" : "most"}`, stroke: variable("quiet"), width: 1, spanGaps: true, points: { show: false }, value: (_, each) => (each === null ? "-" : format(each)) });
    });
    const last = made.series.length;
    if (band) made.bands = [{ series: [last - 1, last], fill: variable("grid") }];
    return made;
  }, { format, height: 320, range: (_, low, high) => padded(low, high) });
  return section("curves", "Losses over samples", "", drawn);
}

function tableSection(report) {
  if (!report.table) return null;
  const [head, ...rows] = report.table;
  const cells = (tag, row) => el("tr", {}, row.map((text, place) => el(place ? tag : "th", { class: place ? "" : "text" }, text)));
  return section("table", "Sizes", "", el("div", { class: "scroll" }, el("table", { class: "ranks" }, el("thead", {}, cells("th", head)), el("tbody", {}, rows.map((row) => cells("td", row))))));
}

function machineSection(report) {
  const { times, ranks, gpus, curves } = report.vitals;
  if (times.length < 2) return null;
  const draw = (title, hint, labels, table, format, factor = 1) => table.length && chart(title, hint, "time", () => {
    const scaled = table.map((curve) => curve.map((value) => (value === null ? null : value * factor)));
    return lines(labels, scaled, times, scaled.length > FEW ? [] : scaled.map((_, place) => place), format);
  }, { format, height: 160, overlay: (plot) => hung(plot, report.hangs) });
  const gib = (value) => `${figures(value)} GiB`;
  const grows = (gpu) => report.findings.filter((each) => each.code === "DDP620" && each.message.startsWith("the GPU") === gpu)
    .map((each) => `${each.code}: ${each.message}`).join("; ");
  const drawn = [
    draw("GPU memory given out by torch", grows(true) || "of each rank", ranks, curves.allocated, gib, 2 ** -30),
    draw("GPU memory in use", "of each GPU, by all processes", gpus, curves.memory, gib, 2 ** -30),
    draw("GPU utilization", "share of time in which a kernel ran: waiting in NCCL is one", gpus, curves.utilization, (value) => `${value.toFixed(0)} %`, 100),
    draw("GPU power", "", gpus, curves.power, (value) => `${value.toFixed(0)} W`),
    draw("GPU temperature", "", gpus, curves.temperature, (value) => `${value.toFixed(0)} \u00b0C`),
    draw("Memory of processes", grows(false) || "of each rank, without its workers", ranks, curves.rss, gib, 2 ** -30),
  ].filter(Boolean);
  return drawn.length ? section("machine", "Memory and GPUs", "Over the time since the start.", drawn) : null;
}

/* Marks the time in which the job made no progress. */
function hung(plot, hangs) {
  const { left, top, width, height } = plot.bbox;
  plot.ctx.save();
  plot.ctx.fillStyle = variable("guilty");
  for (const [from, until] of hangs) {
    const start = Math.max(plot.valToPos(from, "x", true), left), end = Math.min(plot.valToPos(until, "x", true), left + width);
    if (end > start) plot.ctx.fillRect(start, top, end - start, height);
  }
  plot.ctx.restore();
}

/* -- theme, paper, and the rest */

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  redraw(false);
  heats.forEach((each) => each.draw());
}

function isDark() {
  const given = document.documentElement.dataset.theme;
  return given ? given === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function paper() {
  let before;
  addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme;
    setTheme("light");
    redraw(true);
  });
  addEventListener("afterprint", () => setTheme(before));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(document.documentElement.dataset.theme));
  let width = innerWidth, waiting;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(() => setTheme(document.documentElement.dataset.theme), 150);
  });
}

function start() {
  const report = JSON.parse(document.getElementById("content").textContent);
  const series = report.series.ranks.length ? new Series(report.series) : null;
  const parts = [tableSection(report), curvesSection(report), findings(report), rankSection(report, series), stepsSection(report, series), trainingSection(series),
    machineSection(report), stacksSection(report), environmentSection(report), gapsSection(report)].filter(Boolean);
  const links = parts.map((part) => el("a", { href: `#${part.id}` }, part.id === "gaps" ? "Not measured" : part.querySelector("h2").textContent.split(" ")[0]));
  const bar = el("div", { class: "bar" }, el("span", { class: "name" }, `ddpdoctor ${report.command || "report"}`), el("nav", {}, links),
    el("button", { onclick: () => setTheme(isDark() ? "light" : "dark") }, "Light / dark"));
  document.getElementById("report").append(bar, ...verdict(report), ...parts, el("footer", {}, `Made by ${report.made}.`));
  view.on((news) => "rank" in news && charts.forEach((each) => each.plot && each.shared && each.draw()));
  paper();
  document.documentElement.dataset.ready = "true";
}

start();
