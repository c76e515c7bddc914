
// Where the data comes from: the router once a second, or a file; and the controls.

const POLL_MS = 1000;
const ANSWER_MS = 5000;
const LARGEST_FILE_BYTES = 256 * 2 ** 20;

const sections = new Sections(byId("view"));
const history_ = new LiveHistory();
const state = { file: false, paused: false, heard: null, timer: null };

function showState(kind, words) {
  document.documentElement.dataset.state = kind;
  if (byId("status-text").textContent !== words) byId("status-text").textContent = words;
}

function problem(words) {
  byId("problem").hidden = !words;
  byId("problem").textContent = words ?? "";
}

function show(view) {
  byId("subject").textContent = view.subject;
  sections.show(view);
}

async function poll() {
  clearTimeout(state.timer);
  if (state.file || state.paused) return;
  try {
    const answer = await fetch(`${ADDRESS}?since=${history_.seq}`, {
      cache: "no-store",
      headers: keyHeaders(),
      signal: AbortSignal.timeout(ANSWER_MS),
    });
    if (answer.status === 401) return locked();
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const report = await answer.json();
    if (state.file || state.paused) return;
    if (report.schema !== LIVE_SCHEMA) throw new Error("another version of the router: reload the page");
    history_.take(report);
    state.heard = performance.now();
    byId("pause").hidden = false;
    byId("locked").hidden = true;
    showState("live", "Live");
    problem(null);
    show(liveView(report, history_));
  } catch (error) {
    if (!state.file && !state.paused) lost(error);
  }
  if (!state.file && !state.paused) state.timer = setTimeout(poll, POLL_MS);
}

/** The router asks for a key: wait until one is given. */
function locked() {
  const shown = Object.keys(keyHeaders()).length > 0;
  showState("lost", "API key needed");
  problem(shown ? "The router does not accept this API key." : "This router asks for an API key.");
  byId("locked").hidden = false;
  byId("key").focus();
  byId("view").setAttribute("aria-busy", "false");
}

function unlock() {
  keepKey(byId("key").value.trim());
  byId("key").value = "";
  byId("locked").hidden = true;
  problem(null);
  goLive();
}

function lost(error) {
  const age = state.heard === null ? "no data yet"
    : `data is ${asAge((performance.now() - state.heard) / 1000)} old`;
  showState("lost", "Connection lost");
  problem(`Connection to the router lost, ${age}: ${error.message}. Trying again every second.`);
  byId("view").setAttribute("aria-busy", "false");
}

/** Show a run; refuses, with a message, what is neither a replay nor a simulation. */
function openRun(text_, name) {
  let run;
  try {
    run = JSON.parse(text_);
  } catch {
    return problem(`${name} is not JSON; open the file of dualpath replay --out or of dualpath ` +
      "simulate --json.");
  }
  try {
    showRun(run, name, 0);
  } catch (error) {
    problem(`${name} cannot be shown: ${error.message}`);
  }
}

function showRun(run, name, chosen) {
  const views = {
    [REPLAY_SCHEMA]: () => replayView(run, name),
    [SIMULATION_SCHEMA]: () => simulationView(run, name, chosen, (next) => showRun(run, name, next)),
  };
  const schema = run?.schema;
  if (typeof schema !== "string" || !Object.hasOwn(views, schema)) {
    throw new Error(`its schema is ${JSON.stringify(schema ?? null)?.slice(0, 60)}, this page reads ` +
      `${Object.keys(views).join(" and ")}`);
  }
  let view;
  try {
    view = views[schema]();
  } catch {
    throw new Error(`its schema is ${schema}, but a part of it is missing; write it again`);
  }
  state.file = true;
  clearTimeout(state.timer);
  byId("locked").hidden = true;
  problem(null);
  showState("file", `File: ${name}`);
  byId("live").hidden = location.protocol === "file:";
  byId("pause").hidden = true;
  show(view);
}

async function openFile(file) {
  if (file.size > LARGEST_FILE_BYTES) {
    return problem(`${file.name} has ${asBytes(file.size)}, at most ` +
      `${asBytes(LARGEST_FILE_BYTES)} are read.`);
  }
  openRun(await file.text(), file.name);
}

async function openAddress(address) {
  const place = new URL(address, location.href);
  if (place.origin !== location.origin) {
    return problem(`${address} is on another host; this page opens files of its own host only.`);
  }
  try {
    const answer = await fetch(place);
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    openRun(await answer.text(), place.pathname.split("/").at(-1));
  } catch (error) {
    problem(`${address} cannot be read: ${error.message}`);
  }
}

function goLive() {
  state.file = false;
  byId("live").hidden = true;
  byId("pause").hidden = false;
  problem(null);
  showState("connecting", "Connecting");
  poll();
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").value = theme;
}

function remembered() {
  try {
    const theme = localStorage.getItem("dualpath-theme");
    return ["light", "dark"].includes(theme) ? theme : "auto";
  } catch {
    return "auto"; // Storage may be forbidden.
  }
}

byId("theme").addEventListener("change", (event) => {
  setTheme(event.target.value);
  try {
    localStorage.setItem("dualpath-theme", event.target.value);
  } catch {
    // Then the choice lasts as long as the page.
  }
});
byId("pause").addEventListener("click", () => {
  state.paused = !state.paused;
  byId("pause").setAttribute("aria-pressed", String(state.paused));
  if (state.paused) showState("paused", "Paused");
  else poll();
});
byId("live").addEventListener("click", goLive);
byId("open").addEventListener("click", () => byId("file").click());
byId("file").addEventListener("change", (event) => {
  const [file] = event.target.files;
  event.target.value = "";
  if (file) openFile(file);
});
for (const kind of ["dragenter", "dragover"]) {
  addEventListener(kind, (event) => {
    event.preventDefault();
    byId("drop").hidden = false;
  });
}
addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) byId("drop").hidden = true;
});
addEventListener("drop", (event) => {
  event.preventDefault();
  byId("drop").hidden = true;
  const [file] = event.dataTransfer.files;
  if (file) openFile(file);
});

byId("unlock").addEventListener("click", unlock);
byId("key").addEventListener("keydown", (event) => {
  if (event.key === "Enter") unlock();
});

setTheme(remembered());
keyFromAddress();
const asked = new URLSearchParams(location.search).get("file");
if (asked) openAddress(asked);
else if (location.protocol === "file:") showState("file", "No run open");
else poll();
