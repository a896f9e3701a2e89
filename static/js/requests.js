// Two tables: requests that run, and the last that ended.

import { byId, element } from "./dom.js";
import { clock, count, duration, percent, ratio } from "./format.js";

const ENDED_SHOWN = 20;

/** Why reuse ended: a few words for the table, and the sentence behind them. */
const REUSE = {
  full: ["all reused", "Everything that can be reused was"],
  no_block: ["new from there", "Nothing was stored beyond this token"],
  no_checkpoint: ["no checkpoint", "Recurrent layers had no checkpoint beyond this token"],
  diverged: ["prompt differs", "The prompt differs from what was stored, from this token on"],
  evicted: ["evicted", "The blocks beyond this token were evicted"],
  rejected_file: ["file refused", "The block file at this token was damaged or foreign"],
  limit: ["limit", "A limit ended the reuse at this token"],
  disabled: ["cache off", "The cache is switched off"],
  reply_rendered_differently: [
    "reply differs",
    "The template renders the earlier reply differently than it was generated",
  ],
};

const STATE_LEVELS = { decode: "ok", prefill: "ok" };

const cell = (label, kind, ...children) =>
  element("td", { "data-label": label, class: kind }, ...children);

const clipped = (text, kind = "", title = text) =>
  element("span", { class: `clip ${kind}`.trim(), title }, text || "–");

/** The part of an id that tells it apart: chatcmpl-1f00 becomes 1f00. */
const shortId = (id) => clipped(id.replace(/^[a-z]+[-_](?=.)/, ""), "mono", id);

// ── running ─────────────────────────────────────────────────────────────────

let shownRows = "";

export function showRunning(rows) {
  // Most seconds bring nothing new, and then a selection of text should survive.
  const text = JSON.stringify(rows);
  if (text === shownRows) return;
  shownRows = text;
  byId("running").replaceChildren(...rows.map(runningRow));
  byId("running").parentElement.hidden = rows.length === 0;
  byId("running-empty").hidden = rows.length > 0;
}

function runningRow(row) {
  const chip = element("span", { class: "chip", "data-level": STATE_LEVELS[row.state] }, row.state);
  return element(
    "tr",
    {},
    cell("Request", null, shortId(row.id)),
    cell("Client", null, clipped(row.client)),
    cell("State", null, element("span", {}, chip)),
    cell("Prompt", "prefill double", prefill(row)),
    cell("Generated", "num", count(row.generated_tokens)),
  );
}

function prefill(row) {
  const left = Math.max(0, row.prompt_tokens - row.cached_tokens - row.computed_tokens);
  const part = (kind, tokens) => {
    const node = element("div", { class: kind });
    if (kind !== "left") node.style.width = `${ratio(tokens, row.prompt_tokens) * 100}%`;
    return node;
  };
  const words = [
    `${count(row.cached_tokens)} cached`,
    `${count(row.computed_tokens)} computed`,
    left > 0 && `${count(left)} left`,
  ];
  return element(
    "div",
    {},
    element(
      "div",
      { class: "bar", "aria-hidden": "true" },
      part("cached", row.cached_tokens),
      part("computed", row.computed_tokens),
      part("left", left),
    ),
    element("div", { class: "help" }, words.filter(Boolean).join(" · ")),
  );
}

// ── ended ───────────────────────────────────────────────────────────────────

/** The newest first, each once, whatever order the list and the events arrive in. */
export class Ended {
  #rows = [];

  load(rows) {
    this.#rows = [];
    for (const row of [...rows].reverse()) this.#put(row);
    this.#show();
  }

  add(row) {
    this.#put(row);
    this.#show();
  }

  #put(row) {
    this.#rows = [row, ...this.#rows.filter((other) => other.id !== row.id)].slice(0, ENDED_SHOWN);
  }

  #show() {
    byId("ended").replaceChildren(...this.#rows.map(endedRow));
    byId("ended").parentElement.hidden = this.#rows.length === 0;
    byId("ended-empty").hidden = this.#rows.length > 0;
  }
}

function endedRow(row) {
  const { reason, token } = row.omlx.reuse_ended;
  const [words, sentence] = REUSE[reason] ?? [reason, reason];
  const finish = row.error ?? row.finish_reason ?? row.state;
  return element(
    "tr",
    {},
    cell("Ended", null, clock(row.time)),
    cell("Request", null, shortId(row.id)),
    cell("Client", null, clipped(row.client)),
    cell("Prompt", "num", count(row.prompt_tokens)),
    cell("Cached", "num", percent(ratio(row.cached_tokens, row.prompt_tokens))),
    cell("Generated", "num", count(row.generated_tokens)),
    cell("TTFT", "num", duration(row.ttft_ms)),
    cell("Finish", row.state, clipped(finish)),
    cell(
      "Reuse ended",
      null,
      element("span", { title: `${sentence} (${count(token)}).` }, `at ${count(token)} `),
      element("span", { class: "soft", title: `${sentence}.` }, words),
    ),
  );
}
