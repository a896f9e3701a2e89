// The overview: fills itself from the server's history, then follows its events.

import { showCache } from "./cache.js";
import { Chart } from "./chart.js";
import { byId, element, setPairs, setText } from "./dom.js";
import { getJson, listen } from "./feed.js";
import { clock, count, percent, ratio } from "./format.js";
import { Ended, showRunning } from "./requests.js";

const ANNOUNCE_MS = 5000;
const REQUESTS_FETCHED = 100;
const ENDED_STATES = new Set(["completed", "failed", "cancelled"]);
const LINK_WORDS = { live: "Live", lost: "Not connected", paused: "Paused" };

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
  byId("share").style.width = `${ratio(totals.cached_tokens, totals.processed_tokens) * 100}%`;
  setPairs(byId("counts"), [
    ["Tokens generated", count(totals.generated_tokens)],
    ["Requests completed", count(totals.requests.completed)],
    ["cancelled", count(totals.requests.cancelled)],
    ["failed", count(totals.requests.failed)],
    ["rejected", count(totals.requests.rejected)],
  ]);
}

function showModel({ id, layers, block_size: blockSize, namespace }) {
  const kinds = [
    [layers.kv, "KV"],
    [layers.rotating, "rotating"],
    [layers.recurrent, "recurrent"],
  ];
  const parts = kinds.filter(([number]) => number > 0).map(([number, kind]) => `${number} ${kind}`);
  const words = [
    parts.length > 0 && `${parts.join(" + ")} layers`,
    blockSize > 0 && `blocks of ${count(blockSize)} tokens`,
    namespace && `namespace ${namespace}`,
  ];
  const text = words.filter(Boolean).map((word) => ` · ${word}`).join("");
  if (byId("model").textContent !== id + text) {
    byId("model").replaceChildren(element("strong", {}, id), text);
  }
}

function showEngine({ running, waiting, prefill_tps: prefill, decode_tps: decode }) {
  const words = [`${count(running)} running`, `${count(waiting)} waiting`];
  if (prefill > 0) words.push(`prefill ${count(Math.round(prefill))} tokens/s`);
  if (decode > 0) words.push(`decode ${count(Math.round(decode))} tokens/s`);
  setText(byId("engine"), words.join(" · "));
}

function onStats(fresh) {
  stats = fresh;
  showFigures();
  showModel(stats.model);
  showEngine(stats.engine);
  showCache(stats.cache, stats.model.id !== "");
  showRunning(stats.running);
  byId("health").dataset.level = stats.health.level;
  setText(byId("health-text"), stats.health.text);
  chart.update(stats.latest[chart.res]);
}

// ── history and requests ────────────────────────────────────────────────────

async function loadHistory() {
  const res = checked("res");
  const history = await getJson(`/admin/api/history?res=${res}`);
  if (res === checked("res")) chart.load(res, history.rows);
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
  byId("link").dataset.state = state;
  setText(byId("link-text"), LINK_WORDS[state]);
  const banner = byId("banner");
  if (state === "lost" && banner.hidden) {
    const since = stats ? ` The numbers are from ${clock(stats.time)}.` : "";
    banner.textContent = `The connection to the server is lost; trying again.${since}`;
  }
  banner.hidden = state !== "lost";
}

let announced = "";
setInterval(() => {
  if (!stats) return;
  const totals = stats[checked("scope")];
  const text =
    `${count(totals.processed_tokens)} prompt tokens processed, ` +
    `${count(totals.cached_tokens)} cached, efficiency ${percent(totals.efficiency)}`;
  if (announced && text !== announced) setText(byId("announcer"), text);
  announced = text;
}, ANNOUNCE_MS);

for (const input of document.querySelectorAll('input[name="scope"]')) {
  input.addEventListener("change", () => stats && showFigures());
}
for (const input of document.querySelectorAll('input[name="res"]')) {
  input.addEventListener("change", () => loadHistory().catch(() => onState("lost")));
}

listen({ onOpen: refresh, onState, onStats, onRequest });
