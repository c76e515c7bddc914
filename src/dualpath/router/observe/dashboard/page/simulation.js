
// A finished simulation: the JSON of `dualpath simulate --json`, one run at a time, as a view.

const SIMULATION_SCHEMA = "dualpath.simulation/1";
/** Stages in the order of a round's life; files have them sorted by name. */
const STAGE_ORDER = ["scheduling", "buffer", "reading", "waiting for the PE", "prefill",
  "waiting for the DE", "decode"];

function simulationView(document_, name, chosen, choose) {
  const runs = document_.runs;
  const run = runs[chosen];
  return {
    kind: "simulation",
    subject: `${name} · simulated, nothing was served · mode ${run.mode}`,
    tabs: runs.map((each, index) => {
      const button = h("button", { type: "button", "aria-pressed": String(index === chosen) }, each.mode);
      button.addEventListener("click", () => choose(index));
      return button;
    }),
    tiles: simulationTiles(run),
    picture: simulationPicture(run),
    charts: [],
    tables: [stageTable(runs), modesTable(runs)],
    facts: `${run.model} on ${run.prefill_nodes}P${run.decode_nodes}D. ${document_.workload ?? ""}`,
  };
}

function simulationTiles(run) {
  const all = run.prefill_read_bytes + run.decode_read_bytes;
  return [
    { label: "Job completion time", value: asSeconds(run.jct_s), detail: counted(run.agents, "agent") },
    { label: "TTFT, mean", value: asSeconds(run.ttft?.mean_s), detail: `p99 ${asSeconds(run.ttft?.p99_s)}` },
    { label: "TPOT, mean", value: asSeconds(run.tpot?.mean_s), detail: `TTST ${asSeconds(run.ttst?.mean_s)}` },
    { label: "Rounds", value: asCount(run.rounds), alarm: run.unfinished_rounds > 0,
      detail: `${asCount(run.unfinished_rounds)} unfinished` },
    readTile("Storage reads", run.prefill_read_bytes, run.decode_read_bytes, all),
    { label: "What binds", value: run.binds, words: true, detail: `hits ${asShare(ratio(run.hit_tokens, run.prompt_tokens))}` },
  ];
}

function simulationPicture(run) {
  const side = (title, nodes, snic) => {
    const note = counted(nodes, "node");
    return { title, snic, note, shortNote: note };
  };
  return {
    unit: "bytes",
    format: asBytes,
    note: "bytes of the whole run, use in its busy part",
    flows: { readPe: run.prefill_read_bytes, readDe: run.decode_read_bytes },
    prefill: side("Prefill", run.prefill_nodes, run.use.snic_prefill),
    decode: {
      ...side("Decode", run.decode_nodes, run.use.snic_decode),
      hbm: { share: run.use.decode_hbm, title: "mean of the busy part" },
    },
  };
}

function modesTable(runs) {
  const longest = Math.max(...runs.map((run) => run.jct_s));
  const use = (value) => ({ text: asShare(value), share: value });
  return {
    title: "Modes",
    note: "simulated; use is the mean of the busy part",
    stacked: true,
    empty: "No runs.",
    columns: [["mode", true], ["JCT", false], ["TTFT mean", false], ["TTST mean", false],
      ["TPOT mean", false], ["read at PEs", false], ["read at DEs", false], ["SNICs of PEs", false],
      ["SNICs of DEs", false], ["CNICs", false], ["binds", true]],
    rows: runs.map((run) => [run.mode, { text: asSeconds(run.jct_s), share: run.jct_s / longest },
      asSeconds(run.ttft?.mean_s), asSeconds(run.ttst?.mean_s), asSeconds(run.tpot?.mean_s),
      asBytes(run.prefill_read_bytes), asBytes(run.decode_read_bytes), use(run.use.snic_prefill),
      use(run.use.snic_decode), use(run.use.cnic), run.binds]),
  };
}

function stageTable(runs) {
  const place = (stage) => (STAGE_ORDER.includes(stage) ? STAGE_ORDER.indexOf(stage) : Infinity);
  const stages = Object.keys(runs[0].stages_s).sort((a, b) => place(a) - place(b) || 0);
  const most = Math.max(...runs.flatMap((run) => Object.values(run.stages_s).filter(known)));
  return {
    title: "Where a round's time goes",
    note: "means of finished rounds",
    half: true,
    empty: "No stages.",
    columns: [["stage", true], ...runs.map((run) => [run.mode, false])],
    rows: stages.map((stage) => [stage, ...runs.map((run) => ({
      text: asSeconds(run.stages_s[stage]), share: ratio(run.stages_s[stage], most) ?? 0 }))]),
  };
}
