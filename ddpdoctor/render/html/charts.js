"use strict";
/* Curves over steps and over time, by uPlot. */

const HIGHLIGHTS = ["#e11d48", "#7c3aed", "#0891b2", "#ca8a04", "#16a34a", "#db2777", "#475569", "#ea580c"];
const FEW = 16;
const charts = [];

/* Steps and seconds are marked at whole numbers. */
const WHOLE = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

function axis(format, label, size) {
  return {
    stroke: variable("dim"), font: "12px system-ui, sans-serif", label, labelSize: label ? 18 : 0,
    labelFont: "12px system-ui, sans-serif", size: size || 64, gap: 4,
    grid: { stroke: variable("grid"), width: 1 }, ticks: { stroke: variable("grid"), width: 1, size: 4 },
    values: format ? (_, ticks) => ticks.map(format) : (_, ticks) => ticks.map((tick) => tick.toLocaleString("en")),
  };
}

/* A chart that is drawn when it comes into view, and again when colours or width change.

   make() gives uPlot's series and data; it is called for each drawing. */
function chart(title, hint, x, make, options = {}) {
  const holder = el("div", { class: "chart" }, el("h3", {}, title, el("span", {}, hint ? " \u2013 " + hint : "")));
  const made = { holder, plot: null, shared: x === "steps", draw };
  const name = { steps: "step", samples: "samples", time: "time" }[x];
  charts.push(made);
  function draw() {
    const scroll = holder.offsetHeight;
    if (made.plot) {
      holder.style.minHeight = scroll + "px";
      made.plot.destroy();
    }
    const { series, data, bands } = make();
    const config = {
      width: Math.max(280, holder.clientWidth), height: options.height || 200,
      cursor: { drag: { x: true, y: false, setScale: true }, sync: made.shared ? { key: "steps" } : undefined, points: { size: 6 } },
      scales: { x: { time: false }, y: { range: options.range || ((_, low, high) => [options.floor ?? Math.min(0, low), high > low ? high * 1.06 : (high || 0) + 1e-9]) } },
      axes: [{ ...axis(x === "time" ? clock : null, "", 30), incrs: WHOLE }, axis(options.format || duration)],
      series: [{ label: name, value: (_, at) => (at === null ? "-" : x === "time" ? clock(at) : at.toLocaleString("en")) }, ...series],
      bands, legend: { live: true }, hooks: {},
    };
    if (made.shared) {
      config.hooks.setScale = [(plot, key) => key === "x" && zoomed(plot)];
    }
    if (options.overlay) config.hooks.drawClear = [options.overlay];
    made.plot = new uPlot(config, data, holder);
    holder.style.minHeight = "";
    if (made.shared && view.range) made.plot.setScale("x", { min: view.range[0], max: view.range[1] });
  }
  whenVisible(holder, draw);
  return holder;
}

let passing = false;
function zoomed(plot) {
  const { min, max } = plot.scales.x;
  if (passing || min === null || min === undefined) return;
  const xs = plot.data[0];
  const range = min <= xs[0] && max >= xs[xs.length - 1] ? null : [min, max];
  if (JSON.stringify(range) === JSON.stringify(view.range)) return;
  view.change({ range });
}

view.on((news) => {
  if (!("range" in news)) return;
  passing = true;
  for (const each of charts) {
    if (!each.plot || !each.shared) continue;
    const xs = each.plot.data[0];
    const [min, max] = news.range || [xs[0], xs[xs.length - 1]];
    if (each.plot.scales.x.min !== min || each.plot.scales.x.max !== max) each.plot.batch(() => each.plot.setScale("x", { min, max }));
  }
  // uPlot draws, and calls its hooks, at the end of the frame.
  queueMicrotask(() => { passing = false; });
});

function whenVisible(holder, draw) {
  if (!("IntersectionObserver" in window)) { draw(); return; }
  const seen = new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) { seen.disconnect(); draw(); }
  }, { rootMargin: "300px" });
  seen.observe(holder);
}

function redraw(all) {
  for (const each of charts) if (each.plot || all) each.draw();
}

/* Curves of ranks: all of them where they are few, else their span, their median, and the chosen. */
function rankCurves(title, hint, series, value, blamed, options = {}) {
  return chart(title, hint, "steps", () => {
    const { columns, ranks } = series;
    const curves = ranks.map((_, place) => Array.from({ length: columns }, (_, column) => known(value(place, column))));
    return lines(ranks.map((rank) => `rank ${rank}`), curves, series.steps, chosen(ranks, curves, blamed), options.format || duration);
  }, options);
}

function known(value) {
  return value === value ? value : null;
}

/* Places of the ranks whose curves stand out: the one that is chosen, those to blame, of many the highest. */
function chosen(ranks, curves, blamed) {
  const wanted = [ranks.indexOf(view.rank), ...blamed.slice(0, 4).map((rank) => ranks.indexOf(rank))];
  if (ranks.length > FEW) {
    const means = curves.map((curve) => median(curve) ?? -Infinity);
    wanted.push(...ranks.map((_, place) => place).sort((a, b) => means[b] - means[a]).slice(0, 2));
  }
  return [...new Set(wanted)].filter((place) => place >= 0).slice(0, 6);
}

/* Few curves are all drawn, those that stand out in colour; of many the span and the median beside these. */
function lines(names, curves, xs, places, format) {
  const series = [], data = [xs], bands = [];
  const value = (_, each) => (each === null || each === undefined ? "-" : format(each));
  const add = (label, curve, stroke, width) => {
    data.push(curve);
    series.push({ label, stroke, width, value, spanGaps: true, points: { show: xs.length < 2 } });
  };
  const plain = variable("quiet");
  if (curves.length > FEW) {
    const { least, middle, most } = envelope(curves, xs.length);
    add("most", most, plain, 1);
    add("least", least, plain, 1);
    bands.push({ series: [1, 2], fill: variable("grid") });
    add("median", middle, variable("dim"), 1.5);
  } else {
    curves.forEach((curve, place) => { if (!places.includes(place)) add(names[place], curve, plain, 1); });
  }
  places.forEach((place, number) => add(names[place], curves[place], HIGHLIGHTS[number % HIGHLIGHTS.length], 1.5));
  return { series, data, bands };
}

/* The phases of one rank, or of the median rank, one upon the other. */
function phaseChart(series, options) {
  return chart("Phases of a step", options.hint, "steps", () => {
    const place = series.ranks.indexOf(view.rank);
    const names = series.parts;
    const heights = names.map((_, kind) => Array.from({ length: series.columns }, (_, column) => known(
      place >= 0 ? series.at(place, kind, column) : median(series.ranks.map((_, each) => series.at(each, kind, column))))));
    const tops = [];
    for (const height of heights) {
      const below = tops[tops.length - 1];
      tops.push(height.map((value, column) => (value === null ? null : value + (below ? below[column] ?? 0 : 0))));
    }
    const shown = names.map((name, kind) => ({
      label: name, stroke: variable(name), fill: variable(name), width: 0.5, points: { show: false },
      value: (plot, _, at, index) => (index === null ? "-" : duration(heights[kind][index])),
    }));
    // The highest first: each covers what is above its own part.
    return { series: shown.reverse(), data: [series.steps, ...tops.reverse()], bands: [] };
  }, { height: 240 });
}
