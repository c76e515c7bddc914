
// A line or dot chart with a cursor that pointer and arrow keys move.

const DASHES = { de: "7 4", soft: "4 4" };
const PLOT = { left: 80, right: 8, top: 8, bottom: 22, height: 132 };

function niceCeiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].find((step) => step * power >= value * 0.9999) * power;
}

class Chart {
  constructor(title) {
    this.legend = h("div", { class: "legend" });
    this.plot = h("div", { class: "plot" });
    this.heading = h("h2", {}, title);
    this.element = h("section", { class: "panel", "aria-label": title }, this.heading, this.legend,
      this.plot);
    this.cursor = null;
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.move(null));
    this.plot.addEventListener("keydown", (event) => this.press(event));
  }

  point(event) {
    const place = this.plot.getBoundingClientRect();
    const inner = place.width - PLOT.left - PLOT.right;
    this.move(Math.min(Math.max((event.clientX - place.left - PLOT.left) / inner, 0), 1));
  }

  press(event) {
    const step = { ArrowLeft: -0.02, ArrowRight: 0.02 }[event.key];
    if (event.key === "Escape") this.move(null);
    if (!step) return;
    event.preventDefault();
    this.move(Math.min(Math.max((this.cursor ?? 1) + step, 0), 1));
  }

  move(cursor) {
    this.cursor = cursor;
    if (this.shown) this.update(this.shown);
  }

  update(chart) {
    this.shown = chart;
    this.heading.replaceChildren(chart.title, " ", h("small", {}, chart.note ?? ""));
    const focused = this.plot.contains(document.activeElement);
    const at = this.cursor === null ? null : chart.from + this.cursor * (chart.to - chart.from);
    this.plot.replaceChildren(this.drawn(chart, at));
    if (focused) this.plot.firstChild.focus({ preventScroll: true });
    this.legend.replaceChildren(
      ...chart.series.map((series) => legendEntry(series, chart, at)),
      h("span", { class: "quiet" }, at === null ? "" : chart.xFormat(at)),
    );
  }

  drawn(chart, at) {
    const width = Math.max(260, this.plot.clientWidth);
    const values = chart.series.flatMap((series) => series.points.map((point) => point[1]));
    const top = niceCeiling(values.reduce((most, y) => (known(y) && y > most ? y : most), 0));
    const inner = width - PLOT.left - PLOT.right;
    const base = PLOT.height - PLOT.bottom;
    const xAt = (x) => PLOT.left + ((x - chart.from) / (chart.to - chart.from || 1)) * inner;
    const yAt = (y) => base - (y / top) * (base - PLOT.top);
    const rulers = [0, top / 2, top].map((y) => [
      s("line", { class: "grid", x1: PLOT.left, x2: width - PLOT.right, y1: yAt(y), y2: yAt(y) }),
      text(PLOT.left - 6, yAt(y) + 4, chart.format(y), "end quiet"),
    ]);
    const ends = [
      text(PLOT.left, PLOT.height - 4, chart.xFormat(chart.from), "quiet"),
      text(width - PLOT.right, PLOT.height - 4, chart.xFormat(chart.to), "end quiet"),
    ];
    const cursor = at === null ? null
      : s("line", { class: "cursor", x1: xAt(at), x2: xAt(at), y1: PLOT.top, y2: base });
    const spoken = chart.series.map((each) => spokenSeries(each, chart)).join("; ");
    return s(
      "svg",
      {
        viewBox: `0 0 ${width} ${PLOT.height}`,
        tabindex: 0,
        role: "img",
        "aria-label": `${chart.title}, arrow keys move the cursor: ${spoken}`,
      },
      ...rulers.flat(),
      ...ends,
      ...chart.series.map((series) => (chart.dots ? dots : line)(series, xAt, yAt)),
      cursor,
    );
  }
}

function line(series, xAt, yAt) {
  const { points } = series;
  let pen = "M";
  let path = "";
  for (const [x, y] of points) {
    if (!known(y)) {
      pen = "M";
      continue;
    }
    path += `${pen}${xAt(x).toFixed(1)} ${yAt(y).toFixed(1)}`;
    pen = "L";
  }
  // Sparse traffic has points without neighbours, which no line connects.
  const alone = points.filter(([, y], index) =>
    known(y) && !known(points[index - 1]?.[1]) && !known(points[index + 1]?.[1]));
  return s("g", {},
    s("path", { class: `line tone-${series.tone}`, d: path, "stroke-linecap": "round",
      "stroke-dasharray": DASHES[series.tone] || null }),
    alone.map((point) => dot(point, series, xAt, yAt, "alone", 3.4)));
}

function dots(series, xAt, yAt) {
  return s("g", {}, series.points.filter((point) => known(point[1])).map((point) =>
    dot(point, series, xAt, yAt, "dot", 2.4)));
}

function dot([x, y], series, xAt, yAt, kind, r) {
  return s("circle", { class: `${kind} tone-${series.tone}`, cx: xAt(x).toFixed(1),
    cy: yAt(y).toFixed(1), r });
}

function legendEntry(series, chart, at) {
  const sign = chart.dots
    ? s("circle", { class: `bare tone-${series.tone}`, cx: 13, cy: 5, r: 3.5 })
    : s("path", { class: `line tone-${series.tone}`, d: "M0 5H26",
      "stroke-dasharray": DASHES[series.tone] || null });
  const value = at === null ? latest(series) : nearest(series, at);
  return h("span", {}, s("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" }, sign),
    `${series.name} `, h("b", {}, chart.format(value)));
}

function latest(series) {
  return series.now !== undefined ? series.now : series.points.at(-1)?.[1] ?? null;
}

function nearest(series, at) {
  let best = null;
  for (const point of series.points) {
    if (known(point[1]) && (!best || Math.abs(point[0] - at) < Math.abs(best[0] - at))) best = point;
  }
  return best?.[1] ?? null;
}

function spokenSeries(series, chart) {
  return `${series.name} ${chart.format(latest(series))}`;
}
