
// A finished replay: the JSON of `dualpath replay --out`, as a view.

const REPLAY_SCHEMA = "dualpath.replay/1";
const BINS = 120;
const SLOWEST = 50;
const MOST_DOTS = 4000;

function replayView(result, name) {
  const { setting, summary, server } = result;
  const bytes = server?.path_bytes ?? {};
  return {
    kind: "replay",
    subject: `${setting.label || name} · replay of ${setting.trace}` +
      (setting.mode ? ` · mode ${setting.mode}` : ""),
    tiles: replayTiles(summary, bytes),
    picture: replayPicture(bytes, server),
    charts: replayCharts(result.turns, summary.jct_s),
    tables: [snicTable(server?.snic_read_bytes ?? {}), slowestTable(result.turns)],
    facts: `${setting.model}, ${counted(setting.agents, "agent")}, isolation ${setting.isolation}, tool delays ` +
      `${setting.tool_delays}, seed ${setting.seed}, endpoint ${setting.endpoint}` +
      (setting.mode_note ? ` (${setting.mode_note})` : ""),
  };
}

function replayTiles(summary, bytes) {
  const [pe, de] = [bytes.pe_path, bytes.de_path];
  const all = known(pe) && known(de) ? pe + de : null;
  return [
    { label: "Job completion time", value: asSeconds(summary.jct_s),
      detail: counted(summary.sessions, "session") },
    { label: "TTFT, median", value: asSeconds(summary.ttft_s?.p50),
      detail: `p90 ${asSeconds(summary.ttft_s?.p90)} · p99 ${asSeconds(summary.ttft_s?.p99)}` },
    { label: "TPOT, median", value: asSeconds(summary.tpot_s?.p50),
      detail: `TTST ${asSeconds(summary.ttst_s?.p50)}` },
    { label: "Turns", value: asCount(summary.turns), alarm: summary.turns_failed > 0,
      detail: `${asCount(summary.turns_failed)} failed` },
    readTile("Storage reads", pe, de, all),
    { label: "Hit rate", value: asShare(summary.hit_rate),
      detail: `ideal ${asShare(summary.ideal_hit_rate)}` },
  ];
}

function replayPicture(bytes, server) {
  const side = (title) => ({ title, note: "", shortNote: "" });
  return {
    unit: "bytes",
    format: asBytes,
    note: server ? "bytes of the whole run" : "the server reported nothing of its paths",
    flows: {
      readPe: bytes.pe_path ?? null,
      readDe: bytes.de_path ?? null,
      loadDe: bytes.de_to_pe ?? null,
      sendMisses: bytes.pe_to_de ?? null,
      persist: bytes.storage_write ?? null,
    },
    // A result has one number for both.
    words: { sendMisses: "PE HBM → DE buffer, hits and new KV" },
    prefill: side("Prefill"),
    decode: side("Decode"),
  };
}

function replayCharts(turns, end_s) {
  const done = turns.filter((turn) => known(turn.ttft_s));
  const every = Math.ceil(done.length / MOST_DOTS) || 1;
  const time = { from: 0, to: Math.max(end_s, 1e-9), xFormat: asSeconds };
  const ttft = done.filter((_, index) => index % every === 0)
    .map((turn) => [turn.start_s + turn.ttft_s, turn.ttft_s]);
  const tokens = (field, at) => binned(done, at, (turn) => turn[field], end_s);
  const ended = (turn) => turn.start_s + (turn.latency_s ?? turn.ttft_s);
  return [
    { ...time, title: "TTFT", note: every > 1 ? `a dot per ${every} turns` : "a dot per turn",
      format: asSeconds, dots: true,
      series: [{ name: "median", tone: "ink", points: ttft, now: quantile(done.map((t) => t.ttft_s), 0.5) }] },
    { ...time, title: "Prompt tokens", note: "at first tokens", format: asTokenRate, series: [
      { name: "highest", tone: "ink", ...tokens("prompt_tokens", (turn) => turn.start_s + turn.ttft_s) }] },
    { ...time, title: "Generated tokens", note: "at turns' ends", format: asTokenRate, series: [
      { name: "highest", tone: "ink", ...tokens("generated_tokens", ended) }] },
  ];
}

/** Sums per second in equal bins, as points at the bins' ends, and the greatest of them. */
function binned(turns, at, amount, end_s) {
  const span = Math.max(end_s, 1e-9) / BINS;
  const sums = new Array(BINS).fill(0);
  for (const turn of turns) {
    sums[Math.min(Math.max(Math.floor(at(turn) / span), 0), BINS - 1)] += amount(turn);
  }
  const points = sums.map((each, index) => [(index + 1) * span, each / span]);
  return { points, now: Math.max(...points.map((point) => point[1])) };
}

function snicTable(bytes) {
  const rows = Object.entries(bytes).filter((entry) => known(entry[1]));
  const most = Math.max(...rows.map((row) => row[1]), 0);
  return {
    title: "SNIC reads by engine",
    empty: "The server reported nothing of its engines.",
    columns: [["engine", true], ["read", false]],
    rows: rows.map(([name, value]) => [name, { text: asBytes(value), share: ratio(value, most) ?? 0 }]),
  };
}

function slowestTable(turns) {
  const cost = (turn) => (turn.error ? Infinity : turn.ttft_s ?? 0);
  const shown = [...turns].sort((a, b) => cost(b) - cost(a) || 0).slice(0, SLOWEST);
  return {
    title: "Slowest turns",
    note: turns.length > shown.length ? `${SLOWEST} of ${asCount(turns.length)} by TTFT, failed first`
      : "by TTFT, failed first",
    stacked: true,
    empty: "No turns.",
    columns: [["session", true], ["turn", false], ["start", false], ["prompt", false], ["hits", false],
      ["generated", false], ["TTFT", false], ["TPOT", false], ["error", true]],
    rows: shown.map((turn) => [turn.session_id, String(turn.turn), asSeconds(turn.start_s),
      asTokens(turn.prompt_tokens), asShare(ratio(turn.hit_tokens, turn.prompt_tokens)),
      asTokens(turn.generated_tokens), asSeconds(turn.ttft_s), asSeconds(turn.tpot_s),
      { text: turn.error ?? "", alarm: Boolean(turn.error) }]),
  };
}
