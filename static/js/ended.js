// The overview's short list of requests that ended last.

import { byId, element } from "./dom.js";
import { clock, count, duration, percent, ratio } from "./format.js";
import { has, t } from "./i18n.js";
import { clipped, shortId } from "./running.js";

const SHOWN = 8;

const cell = (column, kind, ...children) =>
  element("td", { "data-label": t(`overview.column.${column}`), class: kind }, ...children);

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
    this.#rows = [row, ...this.#rows.filter((other) => other.id !== row.id)].slice(0, SHOWN);
  }

  #show() {
    byId("ended").replaceChildren(...this.#rows.map(endedRow));
    byId("ended").parentElement.hidden = this.#rows.length === 0;
    byId("ended-empty").hidden = this.#rows.length > 0;
  }
}

/** Why reuse ended: a few words for a table, and the sentence behind them. */
export function reuse(reason) {
  const key = `common.reuse.${reason}`;
  return has(key) ? { words: t(key), sentence: t(`${key}.help`) } : { words: reason, sentence: reason };
}

/** How it ended, in a word. */
export function finishWords(row) {
  const how = row.finish_reason ?? row.state;
  return has(`overview.finish.${how}`) ? t(`overview.finish.${how}`) : how;
}

/** Whether it came so far: one that was cancelled in the queue did not. */
export const wasLookedUp = (row) => row.state === "completed" || row.cached_tokens + row.computed_tokens > 0;

function endedRow(row) {
  const { reason, token } = row.omlx.reuse_ended;
  const { words, sentence } = reuse(reason);
  const why = [
    element("span", { title: `${sentence} (${count(token)}).` }, t("common.reuse.at", { token }), " "),
    element("span", { class: "soft", title: `${sentence}.` }, words),
  ];
  const finish = row.error ?? finishWords(row);
  return element(
    "tr",
    {},
    cell("ended", null, clock(row.time)),
    cell("request", null, shortId(row.id)),
    cell("client", null, clipped(row.client)),
    cell("prompt", "num", count(row.prompt_tokens)),
    cell("cached", "num", percent(ratio(row.cached_tokens, row.prompt_tokens))),
    cell("generated", "num", count(row.generated_tokens)),
    cell("ttft", "num", duration(row.ttft_ms)),
    cell("finish", row.state, clipped(finish)),
    cell("reuse", null, ...(wasLookedUp(row) ? why : ["–"])),
  );
}
