
// Both read paths as in Fig. 4: arrows by their bytes, levels of buffers and HBM, and a cell per node.
// A width means the same at all times: each tenfold of bytes adds as much to it. What is not known (null) is drawn thin and without a number.

const PICTURE_HEIGHT = 540;
const [THINNEST, WIDEST] = [1.5, 11];
/** Powers of ten that are drawn thinnest and widest: of bytes per second, and of bytes of a run. */
const DECADES = { "bytes per second": [4, 11], bytes: [6, 14] };

/** Arrows: tone, step of Fig. 4 and words for the list of rates. */
const FLOWS = {
  readPe: ["pe", "1–2", "storage → PE buffer"],
  loadPe: ["pe", "3–4", "PE buffer → PE HBM"],
  sendHits: ["pe", "5–7", "PE HBM → DE buffer, hits"],
  readDe: ["de", "1–2", "storage → DE buffer"],
  loadDe: ["de", "3–5", "DE buffer → PE HBM"],
  sendMisses: ["both", "miss", "PE HBM → DE buffer, new KV"],
  fillDe: ["both", "8–9", "DE buffer → DE HBM"],
  persist: ["write", "persist", "new blocks → storage"],
};

function drawPicture(host, picture) {
  const width = Math.max(300, host.clientWidth);
  const box = Math.min(Math.floor(width * 0.36), 220);
  const pen = new PicturePen(width, box, picture);
  host.replaceChildren(pen.drawn());
}

class PicturePen {
  constructor(width, box, picture) {
    this.width = width;
    this.box = box;
    this.right = width - box;
    this.narrow = box <= 190;
    this.lane = Math.floor(box * (this.narrow ? 0.22 : 0.34));
    this.picture = picture;
  }

  drawn() {
    const { width, box, right, picture } = this;
    const frame = (x) => s("rect", { class: "frame", x, y: 112, width: box, height: 422, rx: 8 });
    const inner = box - 24;
    return s(
      "svg",
      {
        viewBox: `0 0 ${width} ${PICTURE_HEIGHT}`,
        role: "img",
        "aria-label": `Both read paths. ${this.spoken()}`,
      },
      frame(0.5),
      frame(right - 0.5),
      s("rect", { class: "box", x: 0.5, y: 4, width: width - 1, height: 40, rx: 6 }),
      text(width / 2, 29, "External KV storage", "strong middle"),
      this.snic(0, picture.prefill),
      this.snic(right, picture.decode),
      this.level(12, 166, inner, 48, "PE buffer", picture.prefill.buffer),
      this.level(12, 268, inner, 84, "PE HBM", picture.prefill.hbm),
      this.level(right + 12, 268, inner, 84, "DE buffer", picture.decode.buffer),
      this.level(right + 12, 400, inner, 48, "DE HBM", picture.decode.hbm),
      this.arrows(),
      this.load(12, 388, picture.prefill),
      this.queue(this.lane + 12, 138, picture.prefill),
      this.queue(right + this.lane + 12, 138, picture.decode),
      this.cells(12, inner, picture.prefill, "pe"),
      this.cells(right + 12, inner, picture.decode, "de"),
    );
  }

  arrows() {
    const { box, right } = this;
    const pe = this.lane;
    const de = right + pe;
    const back = right + box - 14;
    return [
      this.arrow("readPe", pe, 44, pe, 100, "beside"),
      this.arrow("readPe", pe, 122, pe, 166, "none"),
      this.arrow("loadPe", pe, 214, pe, 268, "beside"),
      this.arrow("readDe", de, 44, de, 100, "beside"),
      this.arrow("readDe", de, 122, de, 268, "none"),
      this.arrow("persist", back, 268, back, 44, "left"),
      this.arrow("sendHits", box - 12, 286, right + 12, 286, "above"),
      this.arrow("loadDe", right + 12, 318, box - 12, 318, "above"),
      this.arrow("sendMisses", box - 12, 350, right + 12, 350, "above"),
      this.arrow("fillDe", de, 352, de, 400, "beside"),
      text((box + right) / 2, 258, "CNIC", "quiet middle"),
    ];
  }

  arrow(name, x1, y1, x2, y2, label) {
    const value = this.picture.flows[name];
    const moving = known(value) && value > 0;
    const size = moving ? widthOf(value, this.picture.unit) : 1.2;
    const head = 5 + size * 0.75;
    const [dx, dy] = [Math.sign(x2 - x1), Math.sign(y2 - y1)];
    const [tx, ty] = [x2 - dx * head, y2 - dy * head];
    const shape = `M${x2} ${y2}L${tx - dy * head * 0.8} ${ty + dx * head * 0.8}` +
      `L${tx + dy * head * 0.8} ${ty - dx * head * 0.8}Z`;
    const words = known(value) ? this.picture.format(value) : "";
    const places = {
      beside: () => text(x1 + 8 + size / 2, (y1 + y2) / 2 + 4, words, ""),
      left: () => text(x1 - 6 - size / 2, 200, words, "end quiet"),
      above: () => text((x1 + x2) / 2, y1 - size / 2 - 4, words, "middle"),
      none: () => null,
    };
    return s(
      "g",
      { "data-flow": name },
      s("title", {}, `${flowWords(this.picture, name)}: ${words || "not known"}`),
      s("path", {
        class: `tone-${moving ? FLOWS[name][0] : "none"}`,
        d: `M${x1} ${y1}L${tx} ${ty}`,
        "stroke-width": size,
      }),
      s("path", { class: `bare tone-${moving ? FLOWS[name][0] : "none"}`, d: shape }),
      places[label](),
    );
  }

  snic(x, side) {
    const share = known(side.snic) ? ` ${asShare(side.snic)}` : "";
    const queued = known(side.queue);
    const wide = !this.narrow && queued ? ` · queue ${asCount(side.queue)}` : "";
    return s(
      "g",
      { class: "snic" },
      queued ? s("title", {}, `read queue: ${asTokens(side.queue)}`) : null,
      s("rect", { class: "box", x: x + 8, y: 100, width: this.box - 16, height: 22, rx: 4 }),
      text(x + this.box / 2, 115.5, `SNIC${share}${wide}`, "middle"),
    );
  }

  level(x, y, width, height, name, store) {
    const used = store?.share;
    const full = known(used) ? Math.min(Math.max(used, 0), 1) * height : 0;
    const middle = y + height / 2;
    const words = known(used) ? `${asShare(used)} used` : "";
    return s(
      "g",
      {},
      s("title", {}, known(used) ? `${name}: ${store.title}` : name),
      s("rect", { class: "box", x, y, width, height, rx: 5 }),
      s("rect", { class: "level", x, y: y + height - full, width, height: full, rx: 3 }),
      text(x + width / 2, words ? middle - 3 : middle + 4, name, "middle"),
      words ? text(x + width / 2, middle + 14, words, "middle quiet") : null,
    );
  }

  load(x, y, side) {
    const lines = [];
    if (known(side.requests)) lines.push(counted(side.requests, "request"));
    if (known(side.tokens)) lines.push(`${asTokens(side.tokens)} to do`);
    return this.lines(x, y, lines);
  }

  /** Where the box of the SNIC has no room for its read queue. */
  queue(x, y, side) {
    return this.narrow && known(side.queue) ? this.lines(x, y, ["queue", asTokens(side.queue)]) : [];
  }

  lines(x, y, words) {
    return words.map((line, index) => text(x, y + 17 * index, line, "quiet"));
  }

  /** Nodes by their SNIC's use: a cell each, at most 4 rows. */
  cells(x, width, side, tone) {
    const note = this.narrow ? side.shortNote : side.note;
    const parts = [text(x, 474, side.title, "strong"), text(x, 524, note, "quiet")];
    const nodes = side.cells ?? [];
    const rows = nodes.length <= 12 ? 1 : nodes.length <= 48 ? 2 : 4;
    const columns = Math.max(Math.ceil(nodes.length / rows), 1);
    const [w, h0] = [Math.min(width / columns, 48), 26 / rows];
    nodes.forEach((node, index) => {
      const at = { x: x + (index % columns) * w, y: 481 + Math.floor(index / columns) * h0 };
      const size = { width: Math.max(w - 2, 1), height: Math.max(h0 - 2, 1), rx: 1.5 };
      const use = known(node.share) ? Math.min(node.share, 1) * size.width : 0;
      parts.push(
        s(
          "g",
          {},
          s("title", {}, node.title),
          s("rect", { class: node.lost ? "lost" : "cell", ...at, ...size }),
          s("rect", { class: `bare tone-${tone}`, ...at, ...size, width: use }),
        ),
      );
    });
    return parts;
  }

  spoken() {
    return Object.entries(FLOWS)
      .filter(([name]) => known(this.picture.flows[name]))
      .map(([name]) => `${flowWords(this.picture, name)}: ` +
        this.picture.format(this.picture.flows[name]))
      .join("; ");
  }
}

function widthOf(bytes, unit) {
  const [least, most] = DECADES[unit];
  const share = (Math.log10(bytes) - least) / (most - least);
  return THINNEST + (WIDEST - THINNEST) * Math.min(Math.max(share, 0), 1);
}

/** What an arrow carries; a picture may know better than `FLOWS`. */
function flowWords(picture, name) {
  return picture.words?.[name] ?? `${FLOWS[name][2]} (${FLOWS[name][1]})`;
}

function text(x, y, words, kind) {
  return s("text", { x, y, class: kind }, words);
}
