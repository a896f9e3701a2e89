// One request in the log: a line, and what opens below it.

import { byId, element, setText } from "./dom.js";
import { finishWords, reuse, wasLookedUp } from "./ended.js";
import { getJson } from "./feed.js";
import { clock, count, dayClock, duration, percent, ratio } from "./format.js";
import { t } from "./i18n.js";
import { phaseTable, reachMs, savedWords, tokenRuler, waterfall } from "./waterfall.js";

const LEVELS = { completed: "ok", cancelled: "warn", failed: "bad" };

export class Entry {
  #detail = null;

  constructor(row) {
    this.row = row;
    this.button = element("button", { type: "button", class: "entry", "aria-expanded": "false" }, ...line(row));
    this.node = element("li", { "data-id": row.id }, this.button);
    this.node.style.setProperty("--own", reachMs(row));
    this.button.addEventListener("click", () => this.toggle());
    const { words } = reuse(row.omlx.reuse_ended.reason);
    this.#haystack = [row.id, row.client, row.route, row.model, row.finish_reason, row.error, words, row.conversation]
      .join(" ")
      .toLowerCase();
  }

  #haystack;

  matches({ words, state, reason }) {
    if (state && this.row.state !== state) return false;
    if (reason && this.row.omlx.reuse_ended.reason !== reason) return false;
    return words.every((word) => this.#haystack.includes(word));
  }

  toggle() {
    const open = this.#detail === null || this.#detail.hidden;
    if (open && this.#detail === null) {
      const id = `detail-${this.row.id}`;
      this.#detail = element("div", { class: "detail", id }, ...detail(this.row));
      this.node.append(this.#detail);
      this.button.setAttribute("aria-controls", id);
    }
    this.#detail.hidden = !open;
    this.button.setAttribute("aria-expanded", String(open));
  }
}

const cell = (kind, label, ...children) =>
  element("span", { class: kind, "data-label": label && t(`requests.column.${label}`) }, ...children);

function line(row) {
  const client = row.client || t("requests.client.unknown");
  return [
    cell("time", null, clock(row.time)),
    cell("who", null, element("span", { class: "clip", title: row.client }, client), element("span", { class: "clip soft" }, row.route)),
    cell("num", "prompt", count(row.prompt_tokens)),
    cell("num", "cached", percent(ratio(row.cached_tokens, row.prompt_tokens))),
    cell("num", "generated", count(row.generated_tokens)),
    cell("num", "ttft", duration(row.ttft_ms)),
    cell("falls", null, waterfall(row)),
    cell("num total", "total", duration(row.total_ms)),
    cell("finish", null, element("span", { class: "chip", "data-level": LEVELS[row.state] }, finishWords(row))),
  ];
}

// ── what opens below ────────────────────────────────────────────────────────

const block = (title, ...children) => element("section", {}, element("h3", {}, title), ...children);

function detail(row) {
  return [
    block(t("requests.detail.time"), phaseTable(row), element("p", { class: "help" }, savedWords(row))),
    block(t("requests.detail.tokens"), tokenRuler(row), element("p", { class: "why" }, whyEnded(row)), whatChanged(row)),
    block(t("requests.detail.facts"), facts(row), texts(row)),
  ];
}

/** Why the rest of the prompt had to be computed. */
function whyEnded(row) {
  const { reason, token } = row.omlx.reuse_ended;
  const { sentence } = reuse(reason);
  if (!wasLookedUp(row)) return t("requests.why.unread");
  const after = Math.max(0, row.prompt_tokens - token);
  return t("requests.why", { sentence, token, count: after });
}

/** Which part of the prompt differs from an earlier one, if that is known. */
function whatChanged({ omlx: { changed } }) {
  if (!changed) return "";
  const { section, since, message = 0, missed_tokens: missed } = changed;
  const key = `requests.changed.${changed.reordered ? "reordered" : section}`;
  const words = t(key, { since, turn: message + 1, count: missed });
  return element("p", { class: "why" }, words);
}

function facts(row) {
  const rate = (tokens, ms) => (tokens > 0 && ms > 0 ? t("overview.speed", { count: Math.round((1000 * tokens) / ms) }) : "–");
  const pairs = [
    [t("requests.fact.id"), element("code", {}, row.id)],
    [t("requests.fact.when"), dayClock(row.time)],
    [t("requests.fact.route"), element("code", {}, row.route)],
    [t("requests.fact.model"), row.model],
    [t("requests.fact.client"), row.client || "–"],
    [t("requests.fact.conversation"), row.conversation || "–"],
    [t("requests.fact.finish"), row.error ?? finishWords(row)],
    [t("requests.fact.prefill"), rate(row.computed_tokens, row.omlx.prefill_ms)],
    [t("requests.fact.decode"), rate(row.generated_tokens - 1, row.omlx.decode_ms)],
  ];
  return element(
    "dl",
    { class: "facts-of" },
    ...pairs.map(([term, value]) => element("div", {}, element("dt", {}, term), element("dd", {}, value))),
  );
}

/** The texts, if they were kept; nothing of them is fetched before somebody opens this request. */
function texts(row) {
  const place = element("div", { class: "texts" });
  fillTexts(place, row.id).catch(() => place.replaceChildren(t("requests.texts.unkept")));
  return place;
}

async function fillTexts(place, id) {
  const { kept } = await getJson("/admin/api/capture");
  if (!kept.includes(id)) return;
  const found = await getJson(`/admin/api/requests/${encodeURIComponent(id)}/text`);
  const texts = [found.prompt, ...found.answers];
  place.replaceChildren(
    ...texts.flatMap((text, index) => {
      const title = index === 0 ? t("requests.texts.prompt") : t("requests.texts.answer", { number: index });
      const words = text || t("requests.texts.none");
      return [element("h4", {}, title), element("pre", { tabindex: 0, role: "region", "aria-label": title }, words)];
    }),
    found.cut ? element("p", { class: "help" }, t("requests.texts.cut")) : "",
  );
}

export function summary(entries) {
  const sum = (name) => entries.reduce((total, entry) => total + entry.row[name], 0);
  const prompt = sum("prompt_tokens");
  setText(
    byId("summary"),
    t("requests.summary", {
      count: entries.length,
      prompt,
      share: percent(ratio(sum("cached_tokens"), prompt)),
    }),
  );
}
