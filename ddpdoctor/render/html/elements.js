"use strict";
/* Elements and words. Text of the run becomes text nodes here, and never markup. */

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) made.append(child);
  }
  return made;
}

function section(id, title, lead, ...children) {
  const head = [el("h2", {}, title)];
  if (lead) head.push(el("p", { class: "lead" }, lead));
  return el("section", { id }, head, ...children);
}

function variable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "-";
  const size = Math.abs(seconds);
  if (size === 0) return "0";
  if (size < 9.995e-4) return figures(seconds * 1e6) + " us";
  if (size < 0.9995) return figures(seconds * 1e3) + " ms";
  if (size < 120) return figures(seconds) + " s";
  return size < 7200 ? (seconds / 60).toFixed(0) + " min" : (seconds / 3600).toFixed(1) + " h";
}

function figures(value) {
  const size = Math.abs(value);
  return value.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}

function bytes(count) {
  if (count === null || count === undefined) return "-";
  return figures(count / 2 ** 30) + " GiB";
}

function rankList(ranks) {
  const parts = [];
  for (const rank of [...ranks].sort((a, b) => a - b)) {
    const last = parts[parts.length - 1];
    if (last && last[1] === rank - 1) last[1] = rank;
    else parts.push([rank, rank]);
  }
  return parts.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(",");
}

function median(values) {
  const known = values.filter((value) => value === value && value !== null).sort((a, b) => a - b);
  if (!known.length) return null;
  const middle = known.length >> 1;
  return known.length % 2 ? known[middle] : (known[middle - 1] + known[middle]) / 2;
}

function legend(names) {
  const entry = (name) => {
    const patch = el("i");
    patch.style.background = `var(--${name})`;
    return el("span", {}, patch, name);
  };
  return el("div", { class: "legend" }, names.map(entry));
}
