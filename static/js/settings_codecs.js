// What each codec would cost and save, on a real state of the model that is served.

import { send } from "./api.js";
import { element, setText } from "./dom.js";
import { bytes, duration, percent } from "./format.js";
import { language, t } from "./i18n.js";

const small = new Intl.NumberFormat(language, { notation: "scientific", maximumFractionDigits: 1 });
const share = new Intl.NumberFormat(language, { style: "percent", maximumSignificantDigits: 2 });
const times = new Intl.NumberFormat(language, { maximumFractionDigits: 1 });

// Below this nobody could tell the answers apart; above that they are other answers.
const KL_FINE = 1e-3;
const KL_BAD = 1e-1;

/** A part of the page. `current()` is the codec that is set. */
export function codecPreview(model, current) {
  const button = element("button", { class: "quiet", type: "button" }, t("settings.codecs.run"));
  const status = element("p", { class: "help", role: "status" });
  const table = element("div");
  const part = element(
    "div",
    { class: "codecs" },
    element("div", { class: "card-head" }, element("h3", {}, t("settings.codecs")), button),
    element("p", { class: "help" }, t("settings.codecs.help")),
    status,
    table,
  );
  if (!model.recurrent) {
    button.disabled = true;
    setText(status, t("settings.codecs.none", { model: model.id }));
    return part;
  }
  button.addEventListener("click", async () => {
    button.disabled = true;
    setText(status, t("settings.codecs.running"));
    try {
      const answer = await send("POST", "/admin/api/gdn/preview", {});
      setText(
        status,
        t("settings.codecs.done", { count: answer.compared_tokens, prompt: answer.prompt_tokens }),
      );
      table.replaceChildren(makeTable(answer.rows, current()));
    } catch (problem) {
      setText(status, problem.message);
    } finally {
      button.disabled = false;
    }
  });
  return part;
}

const COLUMNS = ["codec", "bytes", "error", "max", "kl", "agree", "ms"];

function makeTable(rows, current) {
  const head = element("tr");
  for (const column of COLUMNS) {
    const kind = column === "codec" ? null : "num";
    head.append(element("th", { scope: "col", class: kind }, t(`settings.codecs.${column}`)));
  }
  const body = element("tbody");
  for (const row of rows) body.append(makeRow(row, row.codec === current));
  return element("table", { class: "rows" }, element("thead", {}, head), body);
}

function makeRow(row, isCurrent) {
  const bar = element("div", { class: "size-bar", "aria-hidden": "true" }, element("div"));
  bar.firstChild.style.width = `${100 * row.ratio}%`;
  const name = element("td", { "data-label": t("settings.codecs.codec") }, element("code", {}, row.codec));
  if (isCurrent) name.append(" ", element("span", { class: "chip" }, t("settings.codecs.current")));
  return element(
    "tr",
    { "aria-current": isCurrent ? "true" : null },
    name,
    cell("bytes", bar, size(row)),
    cell("error", row.rel_error === 0 ? "0" : share.format(row.rel_error)),
    cell("max", `${number(row.max_error)} / ${number(row.rms_error)}`),
    cell("kl", element("span", { class: "chip", "data-level": level(row.kl) }, number(row.kl))),
    cell("agree", percent(row.agree)),
    cell("ms", `${took(row.encode_ms)} / ${took(row.decode_ms)}`),
  );
}

function size(row) {
  if (row.ratio === 1) return bytes(row.bytes);
  return `${bytes(row.bytes)} · ${t("settings.codecs.times", { n: times.format(1 / row.ratio) })}`;
}

const took = (ms) => (ms < 10 ? `${times.format(ms)} ms` : duration(ms));

const cell = (column, ...content) =>
  element("td", { class: "num", "data-label": t(`settings.codecs.${column}`) }, ...content);

const number = (value) => (value === 0 ? "0" : small.format(value));

const level = (kl) => (kl < KL_FINE ? "ok" : kl < KL_BAD ? "warn" : "bad");
