"use strict";
/* Ranks by steps, a colour each, on a canvas. */

const MOST_ROWS = 420;
const heats = [];

function heatmap(title, hint, series, values, cold, hot) {
  const canvas = el("canvas", { role: "img", "aria-label": title });
  const tip = el("div", { class: "tip", hidden: "" });
  const low = el("span"), high = el("span"), ramp = el("i");
  const holder = el("div", { class: "heat" },
    el("h3", {}, title, el("span", {}, " \u2013 " + hint)), canvas, tip,
    el("div", { class: "scale" }, low, ramp, high));
  const ranks = series.ranks.length;
  const height = ranks <= 32 ? Math.max(ranks * 16, 32) : MOST_ROWS;
  const left = 64, foot = 22;
  const [least, most] = bounds(values);
  low.textContent = duration(least);
  high.textContent = duration(most) + (ranks * series.columns > 50 ? " or more" : "");
  const made = { draw };
  heats.push(made);

  function columnsShown() {
    if (!view.range) return [0, series.columns];
    const first = series.steps.findIndex((_, column) => series.edges[column + 1] > view.range[0]);
    let last = series.columns;
    while (last > first + 1 && series.edges[last - 1] > view.range[1]) last--;
    return [Math.max(first, 0), last];
  }

  function draw() {
    const width = Math.max(280, holder.clientWidth), ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = (height + foot) * ratio;
    canvas.style.height = height + foot + "px";
    ramp.style.background = `linear-gradient(90deg, ${variable(cold)}, ${variable(hot)})`;
    const [from, until] = columnsShown();
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.imageSmoothingEnabled = false;
    context.drawImage(image(from, until, width - left), left, 0, width - left, height);
    context.fillStyle = variable("dim");
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    const every = Math.max(1, Math.ceil((ranks * 16) / height));
    for (let place = 0; place < ranks; place += every) {
      context.fillText(`rank ${series.ranks[place]}`, left - 6, Math.max(7, ((place + 0.5) * height) / ranks));
    }
    context.textBaseline = "top";
    const ticks = Math.max(2, Math.floor((width - left) / 110));
    for (let tick = 0; tick <= ticks; tick++) {
      const column = Math.min(until, from + Math.round(((until - from) * tick) / ticks));
      context.textAlign = tick === 0 ? "left" : tick === ticks ? "right" : "center";
      context.fillText(series.edges[column].toLocaleString("en"), left + ((column - from) / (until - from)) * (width - left), height + 6);
    }
    mark(context, width);
  }

  function mark(context, width) {
    const place = series.ranks.indexOf(view.rank);
    if (place < 0) return;
    context.strokeStyle = variable("mark");
    context.lineWidth = 2;
    context.strokeRect(left, (place * height) / ranks - 1, width - left - 1, Math.max(3, height / ranks) + 1);
  }

  /* Where several ranks or columns share a point, it shows the highest: no outlier is lost. */
  function image(from, until, width) {
    const rows = Math.min(ranks, height), columns = Math.min(until - from, Math.floor(width));
    const picture = new ImageData(columns, rows);
    const start = rgb(variable(cold)), end = rgb(variable(hot)), none = rgb(variable("page"));
    for (let row = 0; row < rows; row++) {
      for (let column = 0; column < columns; column++) {
        const value = highest(share(row, rows, 0, ranks), share(column, columns, from, until));
        const strength = Math.min(1, Math.max(0, (value - least) / (most - least || 1)));
        const at = (row * columns + column) * 4;
        for (let part = 0; part < 3; part++) {
          picture.data[at + part] = value === value ? start[part] + (end[part] - start[part]) * strength : none[part];
        }
        picture.data[at + 3] = 255;
      }
    }
    const sheet = el("canvas", { width: columns, height: rows });
    sheet.getContext("2d").putImageData(picture, 0, 0);
    return sheet;
  }

  /* The part of from..until that one of so many points stands for. */
  function share(point, points, from, until) {
    const first = from + Math.floor((point * (until - from)) / points);
    return [first, Math.max(first + 1, from + Math.floor(((point + 1) * (until - from)) / points))];
  }

  function highest([first, last], [left, right]) {
    let value = NaN;
    for (let place = first; place < last; place++) {
      for (let column = left; column < right; column++) {
        const each = values[place * series.columns + column];
        if (each === each && !(each <= value)) value = each;
      }
    }
    return value;
  }

  function under(event) {
    const box = canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    if (x < left || y >= height) return null;
    const [from, until] = columnsShown();
    const column = from + Math.floor(((x - left) / (box.width - left)) * (until - from));
    return { place: Math.min(ranks - 1, Math.floor((y * ranks) / height)), column: Math.min(column, until - 1), x, y };
  }
  canvas.addEventListener("mousemove", (event) => {
    const at = under(event);
    tip.hidden = !at;
    if (!at) return;
    tip.textContent = `rank ${series.ranks[at.place]}, ${series.label(at.column)}\nown ${duration(series.own(at.place, at.column))}, wait ${duration(series.wait(at.place, at.column))}`;
    tip.style.left = Math.min(at.x + 14, holder.clientWidth - tip.offsetWidth - 4) + "px";
    tip.style.top = canvas.offsetTop + at.y + 14 + "px";
  });
  canvas.addEventListener("mouseleave", () => { tip.hidden = true; });
  canvas.addEventListener("click", (event) => {
    const at = under(event);
    if (at) view.change({ rank: series.ranks[at.place] });
  });
  whenVisible(holder, draw);
  view.on(draw);
  return holder;
}

/* From a little below the usual to what only one value in two hundred exceeds. */
function bounds(values) {
  const known = Float32Array.from(values.filter((value) => value === value)).sort();
  if (!known.length) return [0, 1];
  const least = known[Math.floor(known.length * 0.02)];
  const most = known[Math.min(known.length - 1, Math.floor(known.length * 0.995))];
  return [least, most > least ? most : least + 1e-9];
}

function rgb(colour) {
  const number = parseInt(colour.slice(1), 16);
  return [(number >> 16) & 255, (number >> 8) & 255, number & 255];
}
