// The cache card: how full each tier is, and what the cache has done.

import { byId, element, setPairs, setText } from "./dom.js";
import { bytes, count, percent, ratio } from "./format.js";

const PENDING_HIGH = 0.8;
const LEVELS = { ok: "ok", off: "wait", full: "warn", degraded: "bad" };

const TIERS = [
  { name: "RAM", used: "hot_bytes", limit: "hot_limit_bytes" },
  { name: "SSD", used: "ssd_bytes", limit: "ssd_limit_bytes" },
  { name: "Waiting to be written", used: "pending_bytes", limit: "pending_limit_bytes", high: PENDING_HIGH },
];

/** isKnown: the cache has reported; before that its zeros mean nothing. */
export function showCache(cache, isKnown) {
  const place = byId("tiers");
  TIERS.forEach((tier, index) => {
    const node = place.children[index] ?? place.appendChild(build(tier.name));
    fill(node, tier, cache[tier.used], cache[tier.limit], isKnown);
  });

  const chip = byId("tier-state");
  chip.dataset.level = LEVELS[cache.tier_state] ?? "wait";
  setText(chip, isKnown ? `SSD tier ${cache.tier_state}` : "SSD tier");

  const rejected = Object.values(cache.rejected_files).reduce((sum, files) => sum + files, 0);
  setPairs(byId("cache-facts"), [
    ["Block look-ups", `${count(cache.hits)} hit, ${count(cache.misses)} missed`],
    ["Blocks in RAM", `${count(cache.blocks_cached)} of ${count(cache.blocks_total)}`],
    ["Files on SSD", count(cache.ssd_files)],
    ["Written, restored", `${bytes(cache.ssd_written_bytes)}, ${bytes(cache.ssd_restored_bytes)}`],
    ["Evicted from RAM, SSD", `${count(cache.evictions_ram)}, ${count(cache.evictions_ssd)}`],
    ["Not persisted for want of room", count(cache.pending_stops)],
    ["Damaged, refused", `${count(cache.corrupt_blocks)}, ${count(rejected)}`],
  ]);
}

function build(name) {
  const bar = element(
    "div",
    { class: "bar", role: "meter", "aria-label": name, "aria-valuemin": 0, "aria-valuemax": 100 },
    element("div"),
  );
  return element(
    "div",
    { class: "tier" },
    element("div", { class: "tier-head" }, element("span", {}, name), element("span", { class: "tier-share" })),
    bar,
    element("div", { class: "tier-foot" }),
  );
}

function inWords(used, limit, isKnown) {
  if (!isKnown) return "not reported yet";
  if (limit > 0) return `${bytes(used)} of ${bytes(limit)}`;
  return used > 0 ? `off; ${bytes(used)} left over` : "off";
}

function fill(node, tier, used, limit, isKnown) {
  const part = ratio(used, limit);
  const words = inWords(used, limit, isKnown);
  const bar = node.querySelector(".bar");
  node.dataset.level = tier.high && part >= tier.high ? "warn" : "ok";
  setText(node.querySelector(".tier-share"), limit > 0 ? percent(part) : "–");
  setText(node.querySelector(".tier-foot"), words);
  bar.setAttribute("aria-valuenow", (part * 100).toFixed(1));
  bar.setAttribute("aria-valuetext", words);
  bar.firstElementChild.style.width = `${part * 100}%`;
}
