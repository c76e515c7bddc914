
// A view is plain data: {subject, tiles, tabs, picture, charts, tables, facts}. `Sections` draws it
// and leaves elements in place from one view to the next, so that scrolling and focus last.

function tile(entry) {
  const share = entry.share;
  const bar = share ? h("div", { class: "share", "aria-hidden": "true" },
    ["pe", "de"].filter((side) => share[side] > 0).map((side) => part(side, share[side]))) : null;
  return h("div", { class: "tile" }, h("h3", {}, entry.label),
    h("p", { class: ["value", entry.alarm ? "alarm" : "", entry.words ? "words" : ""].join(" "),
      title: entry.value }, entry.value), bar,
    h("p", { class: entry.alarm ? "detail alarm" : "detail" }, entry.detail ?? ""));
}

function part(tone, share) {
  const element = h("i", { class: tone });
  element.style.width = `${(share * 100).toFixed(1)}%`;
  return element;
}

/** A table; cells are texts or {text, share, alarm}; columns are [name, is it text?]. */
function tableOf(table) {
  const head = h("tr", {}, table.columns.map(([name, words]) =>
    h("th", { scope: "col", class: words ? "text" : null }, name)));
  const body = table.rows.map((row) => h("tr", {}, row.map((cell, index) => {
    const [name, words] = table.columns[index];
    const value = typeof cell === "object" && cell !== null ? cell : { text: cell };
    const classes = [words ? "text" : "", value.alarm ? "alarm" : ""].join(" ").trim();
    return h(index ? "td" : "th", {
      class: classes || null,
      scope: index ? null : "row",
      title: value.title ?? (words ? value.text : null),
      "data-name": index ? name : null,
    }, String(value.text ?? NOTHING), known(value.share) ? meter(value.share) : null);
  })));
  return h("table", { class: table.stacked ? "stacked" : null }, h("thead", {}, head),
    h("tbody", {}, body));
}

class Sections {
  constructor(main) {
    this.main = main;
    this.tiles = h("div", { class: "tiles full" });
    this.tabs = h("div", { class: "tabs full", role: "group", "aria-label": "Run" });
    this.drawing = h("div", { class: "drawing" });
    this.pictureTitle = h("h2", {});
    this.rates = h("div", { class: "wide" });
    this.picture = h("section", { class: "panel", "aria-label": "Both read paths" },
      this.pictureTitle, this.drawing, key(), h("details", {},
        h("summary", {}, "Every step as a table"), this.rates));
    this.charts = h("div", { class: "charts" });
    this.facts = h("p", { class: "facts full" });
    this.drawn = { charts: new Map(), tables: new Map() };
    this.width = 0;
    new ResizeObserver(() => this.resized()).observe(main);
  }

  resized() {
    if (this.main.clientWidth !== this.width) this.redraw();
  }

  show(view) {
    this.view = view;
    if (!this.tiles.isConnected || this.kind !== view.kind) this.arrange(view);
    this.tiles.replaceChildren(...view.tiles.map(tile));
    this.tabs.hidden = !view.tabs;
    this.tabs.replaceChildren(...(view.tabs ?? []));
    this.facts.textContent = view.facts ?? "";
    this.redraw();
    view.tables.forEach((table) => this.table(table));
    this.main.setAttribute("aria-busy", "false");
  }

  arrange(view) {
    this.kind = view.kind;
    this.drawn = { charts: new Map(), tables: new Map() };
    for (const chart of view.charts) this.drawn.charts.set(chart.title, new Chart(chart.title));
    this.charts.replaceChildren(...[...this.drawn.charts.values()].map((chart) => chart.element));
    const tables = view.tables.map((table) => this.frame(table));
    const beside = view.charts.length ? [this.charts] : [];
    this.main.replaceChildren(this.tiles, this.tabs, this.picture, ...beside, ...tables, this.facts);
  }

  frame(table) {
    const wide = h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": table.title });
    const heading = h("h2", {});
    const classes = ["panel", table.tone ?? "", table.half ? "half" : "full"].join(" ").trim();
    this.drawn.tables.set(table.title, { wide, heading });
    return h("section", { class: classes }, heading, wide);
  }

  table(table) {
    const { wide, heading } = this.drawn.tables.get(table.title);
    heading.replaceChildren(table.title, " ", h("small", {}, table.note ?? ""));
    wide.replaceChildren(table.rows.length ? tableOf(table) : h("p", { class: "quiet" }, table.empty));
  }

  redraw() {
    if (!this.view) return;
    this.width = this.main.clientWidth;
    const { picture, charts } = this.view;
    this.pictureTitle.replaceChildren("Both read paths ", h("small", {}, picture.note));
    drawPicture(this.drawing, picture);
    const flows = Object.entries(FLOWS).filter(([name]) => known(picture.flows[name]));
    this.rates.replaceChildren(tableOf({
      columns: [["step", true], ["read path", true], [picture.unit, false]],
      rows: flows.map(([name, [tone]]) => [flowWords(picture, name),
        { pe: "PE", de: "DE", both: "both", write: NOTHING }[tone], picture.format(picture.flows[name])]),
    }));
    for (const chart of charts) this.drawn.charts.get(chart.title)?.update(chart);
  }
}

function key() {
  const entry = (tone, words) => h("span", {}, s("svg", { viewBox: "0 0 26 10", width: 26, height: 10,
    "aria-hidden": "true" }, s("path", { class: `line tone-${tone}`, d: "M0 5H22" })), ` ${words}`);
  return h("div", { class: "key" }, entry("pe", "PE read path"), entry("de", "DE read path"),
    entry("both", "both"), entry("write", "writes"));
}
