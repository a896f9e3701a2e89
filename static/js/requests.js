// The log of requests: what runs, what has ended, and for each where its time and tokens went.

import { send } from "./api.js";
import { byId, element, setText } from "./dom.js";
import { Entry, summary } from "./entry.js";
import { getJson, listen } from "./feed.js";
import { has, ready, t } from "./i18n.js";
import { showCapture, showLink } from "./live.js";
import { showRunning } from "./running.js";
import { reachMs } from "./waterfall.js";

const FIRST = 100;
const KEPT = 1000;
const REASONS = [
  "full", "no_block", "no_checkpoint", "diverged", "evicted", "rejected_file", "limit", "disabled",
  "reply_rendered_differently",
];

await ready("requests", "overview");

const log = byId("log");
const entries = new Map(); // by id, the newest first in the document
let wanted = FIRST;
let since = null;
let capturing = false;

// ── the list ────────────────────────────────────────────────────────────────

const isEnded = (row) => row.total_ms !== null;

function add(row) {
  if (entries.has(row.id)) return;
  const entry = new Entry(row);
  entries.set(row.id, entry);
  const older = [...log.children].find((node) => entries.get(node.dataset.id).row.time <= row.time);
  log.insertBefore(entry.node, older ?? null);
  while (entries.size > KEPT) {
    entries.delete(log.lastElementChild.dataset.id);
    log.lastElementChild.remove();
  }
}

async function load() {
  try {
    const { requests } = await getJson(`/admin/api/requests?limit=${wanted}`);
    const ended = requests.filter(isEnded);
    ended.forEach(add);
    byId("more").hidden = requests.length < wanted || wanted === KEPT;
    show();
  } catch {
    onState("lost"); // the feed tries again, and its opening comes back here
  }
}

/** Apply the filter, and the scale of what is left. */
function show() {
  const filter = {
    words: byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean),
    state: byId("state").value,
    reason: byId("reason").value,
  };
  const shown = [];
  for (const entry of entries.values()) {
    const fits = entry.matches(filter);
    entry.node.hidden = !fits;
    if (fits) shown.push(entry);
  }
  log.style.setProperty("--scale", Math.max(1, ...shown.map((entry) => reachMs(entry.row))));
  log.dataset.scale = document.querySelector('input[name="scale"]:checked').value;
  log.hidden = shown.length === 0;
  byId("log-empty").hidden = shown.length > 0;
  setText(byId("log-empty"), entries.size > 0 ? t("requests.empty.filter") : t("requests.empty"));
  summary(shown);
}

for (const reason of REASONS) {
  const key = `common.reuse.${reason}`;
  byId("reason").append(element("option", { value: reason }, has(key) ? t(key) : reason));
}
byId("filters").addEventListener("input", show);
byId("filters").addEventListener("submit", (event) => event.preventDefault());
for (const input of document.querySelectorAll('input[name="scale"]')) input.addEventListener("change", show);
byId("more").addEventListener("click", () => {
  wanted = KEPT;
  load();
});

// ── the keyboard ────────────────────────────────────────────────────────────

function move(step) {
  const buttons = [...log.querySelectorAll("li:not([hidden]) > .entry")];
  const now = buttons.indexOf(document.activeElement?.closest("li")?.querySelector(".entry"));
  const next = now < 0 ? 0 : Math.min(buttons.length - 1, Math.max(0, now + step));
  buttons[next]?.focus();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, select, textarea, dialog")) return;
  if (event.key === "j") move(1);
  else if (event.key === "k") move(-1);
  else if (event.key === "/") byId("filter").focus();
  else return;
  event.preventDefault();
});

// ── texts ───────────────────────────────────────────────────────────────────

function onCapture(on) {
  capturing = on;
  showCapture(on);
  byId("capture").setAttribute("aria-pressed", String(on));
  setText(byId("capture"), on ? t("requests.capture.stop") : t("requests.capture.start"));
}

async function setCapture(on) {
  byId("capture-ask").close();
  try {
    const { on: now } = await send("POST", "/admin/api/capture", { on });
    onCapture(now);
  } catch (problem) {
    byId("capture").title = problem.message;
  }
}

byId("capture").addEventListener("click", () =>
  capturing ? setCapture(false) : byId("capture-ask").showModal(),
);
byId("capture-yes").addEventListener("click", () => setCapture(true));
byId("capture-no").addEventListener("click", () => byId("capture-ask").close());

// ── connection ──────────────────────────────────────────────────────────────

function onState(state) {
  showLink(state, since);
}

function onStats(stats) {
  since = stats.time;
  showRunning(stats.running);
}

function onRequest(row) {
  add(row);
  show();
}

listen({ onOpen: load, onState, onStats, onRequest, onCapture });
