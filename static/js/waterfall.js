// Where a request's time went, and where its tokens came from, as bars.

import { element } from "./dom.js";
import { count, duration, ratio, span } from "./format.js";
import { t } from "./i18n.js";

export const PHASES = ["queue", "lookup", "restore", "prefill", "decode"];

/** What it would have taken without the cache; null where that is not known, or was the same. */
export function ghostMs(row) {
  const isKnown = row.cached_tokens > 0 && row.ttft_ms !== null && row.saved_ms !== null;
  return isKnown ? Math.max(0, row.total_ms + row.saved_ms) : null;
}

/** How long a scale must be for this row. */
export const reachMs = (row) => Math.max(row.total_ms, ghostMs(row) ?? 0, 1);

/** Widths follow from two numbers in the style sheet, so a new scale is one number. */
export function waterfall(row) {
  const bar = element("span", { class: "fall-bar" });
  for (const phase of PHASES) {
    const ms = row.omlx[`${phase}_ms`];
    if (ms <= 0) continue;
    const part = element("i", { class: `phase ${phase}`, title: `${t(`requests.phase.${phase}`)}: ${duration(ms)}` });
    part.style.setProperty("--ms", ms);
    bar.append(part);
  }
  const ghost = ghostMs(row);
  const below = element("span", { class: "fall-ghost" });
  if (ghost !== null) {
    const part = element("i", { class: "phase ghost", title: `${t("requests.phase.ghost")}: ${duration(ghost)}` });
    part.style.setProperty("--ms", ghost);
    below.append(part);
  }
  return element("span", { class: "fall", "aria-hidden": "true" }, bar, below);
}

/** The same as numbers, which add up to the total. */
export function phaseTable(row) {
  const line = (name, words, ms, kind = "") =>
    element(
      "tr",
      { class: kind },
      element("th", { scope: "row" }, name && element("i", { class: `phase ${name}` }), words),
      element("td", { class: "num" }, ms === null ? "–" : `${count(Math.round(ms * 100) / 100)} ms`),
      element("td", { class: "soft" }, name ? t(`requests.phase.${name}.help`) : ""),
    );
  const ghost = ghostMs(row);
  return element(
    "table",
    { class: "phases" },
    element(
      "tbody",
      {},
      ...PHASES.map((name) => line(name, t(`requests.phase.${name}`), row.omlx[`${name}_ms`])),
      line("", t("requests.column.total"), row.total_ms, "sum"),
      ghost !== null && line("ghost", t("requests.phase.ghost"), ghost),
    ),
  );
}

/** In words what the cache was worth. */
export function savedWords(row) {
  if (row.cached_tokens === 0) return t("requests.saved.nothing");
  if (row.ttft_ms === null) return t("requests.saved.early");
  if (row.saved_ms === null) return t("requests.saved.unknown");
  const key = row.saved_ms < 0 ? "requests.saved.lost" : "requests.saved.won";
  return t(key, { time: span(Math.abs(row.saved_ms)) });
}

/** The tokens of a request from its first to its last: cached, computed, generated. */
export function tokenRuler(row) {
  const { ram, ssd } = row.omlx.cached_from;
  const left = Math.max(0, row.prompt_tokens - row.cached_tokens - row.computed_tokens);
  const parts = [
    ["ram", ram],
    ["ssd", ssd],
    ["computed", row.computed_tokens],
    ["left", left],
    ["generated", row.generated_tokens],
  ].filter(([, tokens]) => tokens > 0);
  const all = parts.reduce((sum, [, tokens]) => sum + tokens, 0);
  const bar = element("div", { class: "ruler", "aria-hidden": "true" });
  for (const [kind, tokens] of parts) {
    const part = element("i", { class: `tokens ${kind}` });
    part.style.width = `${ratio(tokens, all) * 100}%`;
    bar.append(part);
  }
  const words = parts.map(([kind, tokens]) =>
    element("li", {}, element("i", { class: `tokens ${kind}` }), t(`requests.ruler.${kind}`, { count: tokens })),
  );
  return element("div", {}, bar, element("ul", { class: "ruler-words" }, ...words));
}
