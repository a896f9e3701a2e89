// The table of requests that run: how far each prompt is, and a button to stop it.

import { send } from "./api.js";
import { byId, element, setText } from "./dom.js";
import { count, ratio } from "./format.js";
import { t } from "./i18n.js";

const STATE_LEVELS = { decode: "ok", prefill: "ok" };

const cell = (column, kind, ...children) =>
  element("td", { "data-label": t(`overview.column.${column}`), class: kind }, ...children);

export const clipped = (text, kind = "", title = text) =>
  element("span", { class: `clip ${kind}`.trim(), title }, text || "–");

/** The part of an id that tells it apart: chatcmpl-1f00 becomes 1f00. */
export const shortId = (id) => clipped(id.replace(/^[a-z]+[-_](?=.)/, ""), "mono", id);

const shown = new Map(); // by id: the row's parts that change

export function showRunning(rows) {
  const place = byId("running");
  const ids = new Set(rows.map((row) => row.id));
  for (const [id, parts] of shown) {
    if (ids.has(id)) continue;
    parts.node.remove();
    shown.delete(id);
  }
  // Rows are made once: a selection of text and the focus on a button survive each second.
  for (const row of rows) {
    if (!shown.has(row.id)) shown.set(row.id, build(row));
    const parts = shown.get(row.id);
    fill(parts, row);
    if (parts.node.parentElement !== place) place.append(parts.node);
  }
  place.parentElement.hidden = rows.length === 0;
  byId("running-empty").hidden = rows.length > 0;
}

function build(row) {
  const chip = element("span", { class: "chip" });
  const bar = Object.fromEntries(
    ["cached", "computed", "left"].map((kind) => [kind, element("div", { class: kind })]),
  );
  const words = element("div", { class: "help" });
  const generated = element("td", { "data-label": t("overview.column.generated"), class: "num" });
  const speed = element("td", { "data-label": t("overview.column.speed"), class: "num" });
  const button = element(
    "button",
    { class: "quiet small", type: "button", "aria-label": t("overview.cancel.label", { id: row.id }) },
    t("common.cancel"),
  );
  button.addEventListener("click", () => cancel(row.id, button));
  const node = element(
    "tr",
    { "data-id": row.id },
    cell("request", null, shortId(row.id)),
    cell("client", null, clipped(row.client)),
    cell("state", null, element("span", {}, chip)),
    cell(
      "prompt",
      "prefill double",
      element("div", {}, element("div", { class: "bar", "aria-hidden": "true" }, ...Object.values(bar)), words),
    ),
    speed,
    generated,
    element("td", { class: "act" }, button),
  );
  return { node, chip, bar, words, generated, speed };
}

function fill({ chip, bar, words, generated, speed }, row) {
  const left = Math.max(0, row.prompt_tokens - row.cached_tokens - row.computed_tokens);
  chip.dataset.level = STATE_LEVELS[row.state] ?? "";
  setText(chip, t(`common.state.${row.state}`));
  bar.cached.style.width = `${ratio(row.cached_tokens, row.prompt_tokens) * 100}%`;
  bar.computed.style.width = `${ratio(row.computed_tokens, row.prompt_tokens) * 100}%`;
  const parts = [
    t("overview.prefill.cached", { count: row.cached_tokens }),
    t("overview.prefill.computed", { count: row.computed_tokens }),
    left > 0 && t("overview.prefill.left", { count: left }),
  ];
  setText(words, parts.filter(Boolean).join(" · "));
  setText(generated, count(row.generated_tokens));
  setText(speed, row.tokens_per_s > 0 ? t("overview.speed", { count: row.tokens_per_s }) : "–");
}

async function cancel(id, button) {
  button.disabled = true;
  try {
    await send("POST", `/admin/api/requests/${encodeURIComponent(id)}/cancel`, {});
  } catch (problem) {
    button.disabled = false;
    // 404: it ended by itself meanwhile, and the next second takes its row away.
    if (problem.status !== 404) button.title = problem.message;
  }
}
