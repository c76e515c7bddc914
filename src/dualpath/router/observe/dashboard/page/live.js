
// The running router: the content of `/dualpath/v1/dashboard` as a view.

const ADDRESS = "dualpath/v1/dashboard";
const LIVE_SCHEMA = "dualpath.dashboard/1";
const SMOOTHED_SAMPLES = 5;
/** Charts show the shortest of these spans that has all samples, or else the longest. */
const SPANS_S = [60, 120, 300, 600];

/** Samples of one router as objects; those of another router replace them. */
class LiveHistory {
  constructor() {
    this.run = null;
    this.seq = 0;
    this.samples = [];
  }

  take(report) {
    const restarted = this.run !== null && report.run !== this.run;
    this.run = report.run;
    if (restarted) {
      // The answer begins where the former router's samples ended: the next one has all.
      this.samples = [];
      this.seq = 0;
      return;
    }
    const { columns, rows, kept } = report.history;
    const fresh = rows.map((row) => Object.fromEntries(columns.map((name, i) => [name, row[i]])));
    this.samples = [...this.samples, ...fresh].slice(-kept);
    this.seq = report.seq;
  }

  /** Per-second means of a quantity over some samples each, as points. */
  rate(name) {
    return this.samples.map((sample, index) => {
      const part = this.samples.slice(Math.max(index + 1 - SMOOTHED_SAMPLES, 0), index + 1);
      const span = sum(part.map((each) => each.interval_s));
      return [sample.time_s, span > 0 ? sum(part.map((each) => each[name])) / span : null];
    });
  }

  points(name) {
    return this.samples.map((sample) => [sample.time_s, sample[name]]);
  }

  total(name, lastSeconds) {
    const from = (this.samples.at(-1)?.time_s ?? 0) - lastSeconds;
    return sum(this.samples.filter((each) => each.time_s > from).map((each) => each[name]));
  }
}

function liveView(report, history) {
  const sides = { prefill: [], decode: [] };
  for (const node of report.nodes) sides[node.role].push(node);
  return {
    kind: "live",
    subject: [report.model, report.mode && `mode ${report.mode}`, report.mode_note,
      report.draining && "draining: new requests go to other schedulers"]
      .filter(Boolean).join(" · ") || "no engine has registered yet",
    tiles: liveTiles(report, history),
    picture: livePicture(report, sides),
    charts: liveCharts(report, history),
    tables: [
      nodeTable("Prefill nodes", sides.prefill, "pe"),
      nodeTable("Decode nodes", sides.decode, "de"),
      assignmentTable(report.assignments),
      lostTable(report.lost_engines),
    ],
  };
}

function liveTiles(report, history) {
  const { prefill, decode } = report.engines;
  const [up, lost] = [prefill.up + decode.up, prefill.lost + decode.lost];
  const read = { pe: history.total("pe_read_bytes", 60), de: history.total("de_read_bytes", 60) };
  const all = read.pe + read.de;
  const hits = ratio(history.total("hit_tokens", 60), history.total("prompt_tokens", 60));
  const prompt = history.rate("prompt_tokens").at(-1)?.[1] ?? null;
  const generated = history.rate("generated_tokens").at(-1)?.[1] ?? null;
  return [
    { label: "Median TTFT, 1 min", value: asSeconds(report.recent.ttft_p50_s),
      detail: `p90 ${asSeconds(report.recent.ttft_p90_s)}` },
    { label: "Prompt", value: asTokenRate(prompt), detail: `hits ${asShare(hits)} in 1 min` },
    { label: "Generated", value: asTokenRate(generated),
      detail: `${asTokens(history.total("generated_tokens", 60))} in 1 min` },
    { label: "Requests", value: `${asCount(report.running)} running`,
      detail: waitingDetail(report) },
    readTile("Storage reads, 1 min", read.pe, read.de, all),
    { label: "Engines", value: `${up} up`, alarm: lost > 0 || !prefill.up || !decode.up,
      detail: `${prefill.up} PE, ${decode.up} DE · ${lost} lost` },
  ];
}

function waitingDetail(report) {
  const queued = report.waiting - report.waiting_at_scheduler;
  const where = queued > 0 ? `, ${asCount(queued)} at front ends` : "";
  return `${asCount(report.waiting)} waiting${where}`;
}

function readTile(label, pe, de, all) {
  return {
    label,
    value: asBytes(all),
    share: { pe: all > 0 ? pe / all : 0, de: all > 0 ? de / all : 0 },
    detail: `PE ${asShare(ratio(pe, all))} · DE ${asShare(ratio(de, all))}`,
  };
}

function livePicture(report, sides) {
  const rate = (...steps) => sum(report.steps.filter((row) => steps.includes(row.step))
    .map((row) => row.bytes_per_s));
  return {
    unit: "bytes per second",
    format: asByteRate,
    note: `mean of the last ${Math.round(report.window_s)} s`,
    flows: {
      readPe: rate("4a.1-2"),
      loadPe: rate("4a.3-4"),
      sendHits: rate("4a.5-7"),
      readDe: rate("4b.1-2"),
      loadDe: rate("4b.3-5", "chunk.reload"),
      sendMisses: rate("miss"),
      fillDe: rate("8-9"),
      persist: rate("persist"),
    },
    prefill: liveSide("Prefill", sides.prefill),
    decode: liveSide("Decode", sides.decode),
  };
}

function liveSide(title, nodes) {
  const total = (name) => sum(nodes.map((node) => node[name]));
  const most = Math.max(...nodes.map((node) => node.snic_read_bytes_per_s), 0);
  const limited = nodes.filter((node) => known(node.snic_limit_bytes_per_s));
  const limit = limited.length === nodes.length ? total("snic_limit_bytes_per_s") : null;
  return {
    title,
    note: `${counted(nodes.length, "node")}, ${total("engines_up")} of ${total("engines")} up`,
    shortNote: `${total("engines_up")}/${total("engines")} up`,
    buffer: storeOf(total("buffer_used_tokens"), total("buffer_tokens")),
    hbm: storeOf(total("hbm_used_tokens"), total("hbm_tokens")),
    queue: total("read_queue_tokens"),
    requests: total("unfinished_requests"),
    tokens: total("unfinished_tokens"),
    snic: ratio(total("snic_read_bytes_per_s"), limit),
    cells: nodes.map((node) => ({
      share: snicUse(node) ?? ratio(node.snic_read_bytes_per_s, most) ?? 0,
      lost: node.engines_up < node.engines,
      title: `${node.node}: SNIC ${asByteRate(node.snic_read_bytes_per_s)}, ${node.engines_up} of ` +
        `${node.engines} engines up`,
    })),
  };
}

/** How full a buffer or HBM is. */
function storeOf(used, total) {
  return { share: ratio(used, total), title: `${asTokens(used)} of ${asTokens(total)}` };
}

function snicUse(node) {
  return ratio(node.snic_read_bytes_per_s, node.snic_limit_bytes_per_s);
}

function nodeTable(title, nodes, tone) {
  const most = (name) => Math.max(...nodes.map((node) => node[name]), 0);
  const [mostRead, mostCnic] = [most("snic_read_bytes_per_s"), most("cnic_bytes_per_s")];
  const mostQueue = most("read_queue_tokens");
  const level = (used, total) => {
    const { share, title: words } = storeOf(used, total);
    return { text: asShare(share), share: share ?? 0, title: words };
  };
  const limited = nodes.some((node) => snicUse(node) !== null);
  return {
    title,
    tone,
    half: true,
    stacked: true,
    empty: "No engine of this role has registered.",
    note: `bars of ${limited ? "" : "SNIC, "}CNIC and queue: share of the busiest node's`,
    columns: [["node", true], ["up", false], ["SNIC read", false], ["CNIC", false],
      ["read queue", false], ["buffer", false], ["HBM", false]],
    rows: nodes.map((node) => [
      node.node,
      { text: `${node.engines_up}/${node.engines}`, alarm: node.engines_up < node.engines },
      { text: asByteRate(node.snic_read_bytes_per_s),
        share: snicUse(node) ?? ratio(node.snic_read_bytes_per_s, mostRead) ?? 0,
        title: snicUse(node) === null ? "" : `${asShare(snicUse(node))} of ` +
          asByteRate(node.snic_limit_bytes_per_s) },
      { text: asByteRate(node.cnic_bytes_per_s), share: ratio(node.cnic_bytes_per_s, mostCnic) ?? 0 },
      { text: asTokens(node.read_queue_tokens), share: ratio(node.read_queue_tokens, mostQueue) ?? 0 },
      level(node.buffer_used_tokens, node.buffer_tokens),
      level(node.hbm_used_tokens, node.hbm_tokens),
    ]),
  };
}

function liveCharts(report, history) {
  const to = history.samples.at(-1)?.time_s ?? report.now_s;
  const age = to - (history.samples[0]?.time_s ?? to);
  const from = to - (SPANS_S.find((span) => span >= age) ?? SPANS_S.at(-1));
  const time = { from, to, xFormat: (x) => agoText(to - x) };
  const series = (name, tone, points) =>
    ({ name, tone, points: points.filter((point) => point[0] >= from) });
  return [
    { ...time, title: "TTFT", note: "of the requests of each second", format: asSeconds, series: [
      { ...series("median", "ink", history.points("ttft_p50_s")), now: report.recent.ttft_p50_s },
      { ...series("p90", "soft", history.points("ttft_p90_s")), now: report.recent.ttft_p90_s }] },
    { ...time, title: "Throughput", note: "5 s means", format: asTokenRate, series: [
      series("prompt", "ink", history.rate("prompt_tokens")),
      series("generated", "soft", history.rate("generated_tokens"))] },
    { ...time, title: "Storage reads", note: "5 s means", format: asByteRate, series: [
      series("PE path", "pe", history.rate("pe_read_bytes")),
      series("DE path", "de", history.rate("de_read_bytes"))] },
  ];
}

function agoText(seconds) {
  if (seconds < 1) return "now";
  return seconds < 100 ? `${Math.round(seconds)} s ago`
    : `${(seconds / 60).toFixed(seconds % 60 < 1 ? 0 : 1)} min ago`;
}

function assignmentTable(assignments) {
  const side = (note, role) => sum(note.reads.filter((part) => part.side === role)
    .map((part) => part.tokens));
  return {
    title: "Last assignments",
    note: "newest first; reasons as in the reference of endpoints",
    stacked: true,
    empty: "Nothing has been assigned yet.",
    columns: [["request", true], ["prompt", false], ["hits", false], ["PE", true], ["why", true],
      ["DE", true], ["why", true], ["read at PE", false], ["read at DE", false], ["why", true]],
    rows: assignments.map((note) => [
      note.request_id,
      asTokens(note.prompt_tokens),
      asShare(ratio(note.hit_tokens, note.prompt_tokens)),
      note.prefill_engine || NOTHING, note.pe_reason,
      note.decode_engine, note.de_reason,
      asTokens(side(note, "prefill")), asTokens(side(note, "decode")), note.read_reason,
    ]),
  };
}

function lostTable(engines) {
  const ofGroups = engines.some((engine) => engine.group);
  const group = (shown) => (ofGroups ? [shown] : []);
  return {
    title: "Lost engines",
    stacked: true,
    empty: "None. Engines that have deregistered are not listed.",
    columns: [["engine", true], ["role", true], ...group(["group", true]), ["node", true],
      ["silent for", false]],
    rows: engines.map((engine) => [{ text: engine.engine_id, alarm: true }, engine.role,
      ...group(engine.group || NOTHING), engine.node, asAge(engine.silent_s)]),
  };
}
