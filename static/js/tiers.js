// The cache card: how full each tier is, and what the cache has done.

import { byId, element, setPairs, setText } from "./dom.js";
import { bytes, count, percent, ratio } from "./format.js";
import { t } from "./i18n.js";

const PENDING_HIGH = 0.8;
const LEVELS = { ok: "ok", off: "wait", full: "warn", degraded: "bad" };

/** `of`: in which part of the statistics. `high`: from which share on it is told apart. */
const TIERS = [
  { name: "overview.tier.ram", of: "cache", used: "hot_bytes", limit: "hot_limit_bytes" },
  { name: "overview.tier.ssd.name", of: "cache", used: "ssd_bytes", limit: "ssd_limit_bytes" },
  {
    name: "overview.tier.pending",
    of: "cache",
    used: "pending_bytes",
    limit: "pending_limit_bytes",
    high: PENDING_HIGH,
  },
  {
    name: "overview.tier.gdn",
    of: "gdn",
    used: "pending_bytes",
    limit: "pending_limit_bytes",
    high: PENDING_HIGH,
    recurrent: true,
  },
];

export function showTiers(stats) {
  const { cache, gdn, model } = stats;
  const isKnown = model.id !== ""; // before the cache has reported its zeros mean nothing
  const place = byId("tiers");
  TIERS.filter((tier) => !tier.recurrent || model.layers.recurrent > 0).forEach((tier, index) => {
    const node = place.children[index] ?? place.appendChild(build(t(tier.name)));
    fill(node, tier, stats[tier.of][tier.used], stats[tier.of][tier.limit], isKnown);
  });

  const chip = byId("tier-state");
  chip.dataset.level = LEVELS[cache.tier_state] ?? "wait";
  setText(chip, isKnown ? t(`overview.tier.state.${cache.tier_state}`) : t("overview.tier.ssd"));

  const rejected = Object.values(cache.rejected_files).reduce((sum, files) => sum + files, 0);
  const sidecars = [
    [t("overview.fact.checkpoints"), count(gdn.checkpoints)],
    [t("overview.fact.codec"), t("overview.fact.pair", { first: gdn.storage, second: gdn.codec })],
  ];
  setPairs(byId("cache-facts"), [
    [
      t("overview.fact.lookups"),
      t("overview.fact.lookups.value", { hits: cache.hits, misses: cache.misses }),
    ],
    [
      t("overview.fact.blocks"),
      t("overview.fact.blocks.value", { used: cache.blocks_cached, all: cache.blocks_total }),
    ],
    [t("overview.fact.files"), count(cache.ssd_files)],
    [t("overview.fact.moved"), pair(bytes(cache.ssd_written_bytes), bytes(cache.ssd_restored_bytes))],
    [t("overview.fact.evicted"), pair(cache.evictions_ram, cache.evictions_ssd)],
    [t("overview.fact.stops"), count(cache.pending_stops)],
    [t("overview.fact.bad"), pair(cache.corrupt_blocks, rejected)],
    ...(model.layers.recurrent > 0 ? sidecars : []),
  ]);
}

const pair = (first, second) => t("overview.fact.pair", { first, second });

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
  if (!isKnown) return t("overview.tier.unknown");
  if (limit > 0) return t("overview.tier.used", { used: bytes(used), limit: bytes(limit) });
  return used > 0 ? t("overview.tier.left", { used: bytes(used) }) : t("overview.tier.off");
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
