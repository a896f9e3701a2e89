// The overview: fills itself from the server's history, then follows its events.

import { Chart } from "./chart.js";
import { byId, element, setPairs, setText } from "./dom.js";
import { Ended } from "./ended.js";
import { getJson, listen } from "./feed.js";
import { count, percent, ratio, span } from "./format.js";
import { ready, t } from "./i18n.js";
import { showCapture, showLink } from "./live.js";
import { showMemory } from "./memory.js";
import { showRunning } from "./running.js";
import { showTiers } from "./tiers.js";

const ANNOUNCE_MS = 5000;
const REQUESTS_FETCHED = 50;
const ENDED_STATES = new Set(["completed", "failed", "cancelled"]);

await ready("overview");

const chart = new Chart();
const ended = new Ended();
let stats = null;
let endedMeanwhile = null; // while the list is being fetched

// ── numbers ─────────────────────────────────────────────────────────────────

const checked = (name) => document.querySelector(`input[name="${name}"]:checked`).value;

function showFigures() {
  const totals = stats[checked("scope")];
  setText(byId("processed"), count(totals.processed_tokens));
  setText(byId("cached"), count(totals.cached_tokens));
  setText(byId("efficiency"), percent(totals.efficiency));
  setText(byId("saved"), span(totals.saved_ms));
  byId("share").style.width = `${ratio(totals.cached_tokens, totals.processed_tokens) * 100}%`;
  setPairs(byId("counts"), [
    [t("overview.counts.generated"), count(totals.generated_tokens)],
    [t("overview.counts.completed"), count(totals.requests.completed)],
    [t("overview.counts.cancelled"), count(totals.requests.cancelled)],
    [t("overview.counts.failed"), count(totals.requests.failed)],
    [t("overview.counts.rejected"), count(totals.requests.rejected)],
    [t("overview.counts.unfinished"), count(totals.unfinished_tokens)],
  ]);
}

function showModel({ id, layers, block_size: blockSize, namespace }) {
  const kinds = [
    [layers.kv, "kv"],
    [layers.rotating, "rotating"],
    [layers.recurrent, "recurrent"],
  ];
  const parts = kinds.filter(([number]) => number > 0).map(([number, kind]) => t(`overview.model.${kind}`, { count: number }));
  const words = [
    parts.length > 0 && t("overview.model.layers", { kinds: parts.join(" + ") }),
    blockSize > 0 && t("overview.model.blocks", { count: blockSize }),
    namespace && t("overview.model.namespace", { name: namespace }),
  ];
  const text = words.filter(Boolean).map((word) => ` · ${word}`).join("");
  if (byId("model").textContent !== id + text) {
    byId("model").replaceChildren(element("strong", {}, id), text);
  }
}

function showEngine({ running, waiting, prefill_tps: prefill, decode_tps: decode }) {
  const words = [
    t("overview.engine.running", { count: running }),
    t("overview.engine.waiting", { count: waiting }),
  ];
  if (prefill > 0) words.push(t("overview.engine.prefill", { count: Math.round(prefill) }));
  if (decode > 0) words.push(t("overview.engine.decode", { count: Math.round(decode) }));
  setText(byId("engine"), words.join(" · "));
}

function onStats(fresh) {
  stats = fresh;
  showFigures();
  showModel(stats.model);
  showEngine(stats.engine);
  showMemory(stats.memory);
  showTiers(stats);
  showRunning(stats.running);
  byId("health").dataset.level = stats.health.level;
  const values = Object.entries(stats.health.values).map(([name, value]) => [name, Math.round(value)]);
  setText(byId("health-text"), t(`overview.health.${stats.health.code}`, Object.fromEntries(values)));
  chart.update(stats.latest[chart.res]);
}

// ── history and requests ────────────────────────────────────────────────────

async function loadHistory() {
  const res = checked("res");
  const history = await getJson(`/admin/api/history?res=${res}`);
  if (res === checked("res")) chart.load(res, history.rows, history.marks);
}

async function loadRequests() {
  endedMeanwhile = [];
  try {
    const { requests } = await getJson(`/admin/api/requests?limit=${REQUESTS_FETCHED}`);
    ended.load(requests.filter((row) => ENDED_STATES.has(row.state)));
    endedMeanwhile.forEach((row) => ended.add(row));
  } finally {
    endedMeanwhile = null;
  }
}

function onRequest(row) {
  if (endedMeanwhile) endedMeanwhile.push(row);
  ended.add(row);
}

async function refresh() {
  try {
    await Promise.all([loadHistory(), loadRequests()]);
  } catch {
    onState("lost"); // the feed tries again, and its opening comes back here
  }
}

// ── connection ──────────────────────────────────────────────────────────────

function onState(state) {
  showLink(state, stats?.time);
}

let announced = "";
setInterval(() => {
  if (!stats) return;
  const totals = stats[checked("scope")];
  const text = t("overview.announce", {
    processed: totals.processed_tokens,
    cached: totals.cached_tokens,
    efficiency: percent(totals.efficiency),
  });
  if (announced && text !== announced) setText(byId("announcer"), text);
  announced = text;
}, ANNOUNCE_MS);

for (const input of document.querySelectorAll('input[name="scope"]')) {
  input.addEventListener("change", () => stats && showFigures());
}
for (const input of document.querySelectorAll('input[name="res"]')) {
  input.addEventListener("change", () => loadHistory().catch(() => onState("lost")));
}

const onSettings = () => loadHistory().catch(() => onState("lost")); // it has a mark for this

listen({ onOpen: refresh, onState, onStats, onRequest, onCapture: showCapture, onSettings });
