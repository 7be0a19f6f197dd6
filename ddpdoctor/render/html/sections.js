"use strict";
/* The parts of the page that are words and tables. */

const FIRST_ROWS = 24;

function verdict(report) {
  const { level, text, code } = report.verdict;
  return [
    el("p", { class: "run" }, report.title),
    el("div", { class: `verdict level-${level}` },
      code ? el("div", { class: "code" }, `${level} ${code}`) : null, el("h1", {}, text)),
    el("ul", { class: "summary" }, report.summary.map((line) => el("li", {}, line))),
  ];
}

function findings(report) {
  if (!report.findings.length) return null;
  return section("findings", "Findings", "", report.findings.map(finding));
}

function finding(found) {
  const facts = el("dl");
  for (const line of found.calls) facts.append(el("dt", {}, "call"), el("dd", { class: "place" }, line));
  for (const line of found.evidence) facts.append(el("dt", {}, "evidence"), el("dd", {}, line));
  if (found.fix) facts.append(el("dt", {}, "fix"), el("dd", { class: "fix" }, found.fix));
  if (found.paste) facts.append(el("dt", {}, "paste"), el("dd", {}, el("div", { class: "paste" }, found.paste)));
  const frame = found.frame.length ? el("div", { class: "frame" }, found.frame.map(codeRow)) : null;
  return el("article", { class: `finding level-${found.severity}`, id: `finding-${found.code}` },
    el("h3", {}, el("span", { class: "code" }, `${found.severity} ${found.code}`), found.message),
    found.place ? el("div", { class: "place" }, found.place) : null, frame, facts);
}

function codeRow([number, text, guilty]) {
  return el("div", { class: guilty ? "row guilty" : "row" }, el("span", { class: "number" }, `${guilty ? "> " : ""}${number}`), text);
}

/* -- the ranks */

function rankSection(report, series) {
  if (!report.ranks.length) return null;
  const rows = report.ranks;
  const longest = Math.max(...rows.map((row) => (row.parts || []).reduce((a, b) => a + b, 0)), 1e-9);
  const columns = rankColumns(rows, longest);
  const body = el("tbody");
  const order = { key: null, down: false, count: FIRST_ROWS };
  const heads = columns.map((column) => el("th", {
    class: column.text ? "text" : "", scope: "col", tabindex: "0",
    onclick: () => sort(column), onkeydown: (event) => event.key === "Enter" && sort(column),
  }, column.name, column.unit ? el("span", { class: "unit" }, ` ${column.unit}`) : null));
  const more = el("button", { class: "more", onclick: () => { order.count = rows.length; fill(); } });

  function sort(column) {
    order.down = order.key === column.key ? !order.down : !column.text;
    order.key = column.key;
    fill();
  }

  function fill() {
    const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
    const sorted = [...rows].sort((a, b) => (order.down ? -1 : 1) * compare(order.key(a), order.key(b)) || a.rank - b.rank);
    body.replaceChildren(...sorted.slice(0, order.count).map((row) => rankRow(row, columns)));
    columns.forEach((column, at) => {
      if (column.key === order.key) heads[at].setAttribute("aria-sort", order.down ? "descending" : "ascending");
      else heads[at].removeAttribute("aria-sort");
    });
    more.hidden = order.count >= rows.length;
    more.textContent = `Show all ${rows.length} ranks`;
  }
  order.key = (columns.find((column) => column.name === "own") || columns[0]).key;
  order.down = columns.some((column) => column.name === "own");
  fill();
  view.on(fill);
  return section("ranks", "Ranks",
    "Own time is the rank's own part of a step; wait is its time waiting for others, so the rank that waits most is not the slow one. Means over the run. Click a rank to follow it in the charts.",
    legend(series ? series.parts : []), el("div", { class: "scroll" }, el("table", { class: "ranks" }, el("thead", {}, el("tr", {}, heads)), body)), more);
}

function rankColumns(rows, longest) {
  const has = (name) => rows.some((row) => row[name] !== undefined);
  const cell = (text) => document.createTextNode(text);
  const seconds = (name, get, unit) => ({ name, unit, key: (row) => get(row) ?? -1, cell: (row) => cell(duration(get(row))) });
  const columns = [
    { name: "rank", key: (row) => row.rank, cell: (row) => cell(row.finding ? `${row.rank} \u25c2 ${row.finding}` : `${row.rank}`), text: true },
    { name: "node", show: new Set(rows.map((row) => row.node)).size > 1, key: (row) => row.node || "", cell: (row) => cell(row.node || "-"), text: true },
    { name: "state", key: (row) => row.state || "", cell: (row) => cell(row.state || "-"), text: true, class: "state" },
    { name: "steps", key: (row) => row.steps ?? -1, cell: (row) => cell(row.steps?.toLocaleString("en") ?? "-") },
    { ...seconds("own", (row) => row.own), show: has("own") },
    { ...seconds("wait", (row) => row.parts && row.parts[5]), show: has("parts") },
    { ...seconds("longest step", (row) => row.longest), show: has("longest") },
    { name: "where a step goes", show: has("parts"), key: (row) => (row.parts ? row.parts[0] : -1), text: true, class: "wide", cell: (row) => phaseBar(row, longest) },
    { name: "GPU peak", show: has("peak"), key: (row) => row.peak ?? -1, cell: (row) => cell(bytes(row.peak)) },
    { name: "memory", show: has("rss"), key: (row) => row.rss ?? -1, cell: (row) => cell(bytes(row.rss)) },
  ];
  return columns.filter((column) => column.show !== false);
}

function rankRow(row, columns) {
  const kinds = [row.rank === view.rank ? "selected" : "", row.finding ? "blamed" : "", row.failed ? "failed" : ""];
  const made = el("tr", { class: kinds.join(" ").trim(), onclick: () => view.change({ rank: view.rank === row.rank ? null : row.rank }) });
  for (const column of columns) {
    const shown = el("td", { class: `${column.text ? "text" : ""} ${column.class || ""}`.trim() }, column.cell(row));
    if (column.class === "state" && row.state) shown.title = row.state;
    made.append(shown);
  }
  return made;
}

const PARTS = ["data", "forward", "backward", "optimizer", "other", "wait"];

function phaseBar(row, longest) {
  const bar = el("div", { class: "stack" });
  (row.parts || []).forEach((value, kind) => {
    const part = el("span", { title: `${PARTS[kind]} ${duration(value)}${kind === 2 && row.unsplit ? ", with the wait" : ""}` });
    part.style.width = `${(100 * value) / longest}%`;
    part.style.background = `var(--${PARTS[kind]})`;
    bar.append(part);
  });
  return bar;
}

/* -- stacks, environment, gaps */

function stacksSection(report) {
  if (!report.stacks) return null;
  const { head, roots, missing } = report.stacks;
  return section("stacks", "Stacks", `Of all ranks, ${head}.`, el("div", { class: "tree" },
    missing.map(([ranks, why]) => el("div", { class: "line" }, `[${ranks}] no stack: ${why}`)), roots.map((root) => stackNode(root, 0))));
}

function stackNode(node, depth) {
  const made = el("details", { class: node.odd ? "odd" : "", open: depth < 40 ? "" : null },
    el("summary", {}, el("b", {}, `[${node.ranks}]`), el("span", { class: "dim" }, ` ${node.count === 1 ? "1 rank" : node.count + " ranks"}${node.odd ? ", not where most are" : ""}`)));
  for (const [place, name, code] of node.frames) {
    made.append(name === undefined
      ? el("div", { class: "line" }, el("span", {}, "\u2026 " + place))
      : el("div", { class: "line" }, place + "  ", el("span", {}, name), code ? "  " + code : ""));
  }
  for (const [ranks, text] of node.ends) made.append(el("div", { class: "line" }, el("span", {}, `[${ranks}] \u2026 ${text}`)));
  node.children.forEach((child) => made.append(stackNode(child, depth + 1)));
  return made;
}

function environmentSection(report) {
  const facts = el("dl", { class: "facts" });
  for (const [name, text] of report.environment) facts.append(el("dt", {}, name), el("dd", {}, text));
  return section("environment", "Environment and command", "", facts);
}

function gapsSection(report) {
  if (!report.gaps) return null;
  const said = report.gaps.length ? el("ul", { class: "gaps" }, report.gaps.map((line) => el("li", {}, line)))
    : el("p", {}, "Everything that ddpdoctor measures was measured.");
  return section("gaps", "What was not measured", "", said);
}
