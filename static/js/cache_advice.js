// How large the cache should be: what other sizes would have kept of what was reused.

import { byId, element, setText } from "./dom.js";
import { bytes, percent, ratio } from "./format.js";
import { t } from "./i18n.js";

const ROWS = 7;
const ENOUGH = 0.995;

export function showAdvice({ hours, reused_tokens: reused, kept }, cache) {
  byId("advice-empty").hidden = reused > 0;
  byId("advice").hidden = reused === 0;
  byId("advice-text").hidden = reused === 0;
  if (!reused) return;

  const share = ({ tokens }) => ratio(tokens, reused);
  const enough = kept.findIndex((row) => share(row) >= ENOUGH);
  const last = enough < 0 ? kept.length - 1 : enough;
  const rows = kept.slice(Math.max(0, last - ROWS + 2), last + 2);
  setText(
    byId("advice-text"),
    t("cache.advice.text", { hours, part: percent(share(kept[last])), size: size(kept[last].bytes) }),
  );
  byId("advice").replaceChildren(
    ...rows.map((row) => line(size(row.bytes), share(row), "")),
    ...limits(cache).map(([name, limit]) => {
      // A cache between two sizes keeps at least what the smaller one does.
      const smaller = kept.findLast((row) => row.bytes <= limit);
      return line(t(name, { size: bytes(limit) }), smaller ? share(smaller) : 0, "yours");
    }),
  );
}

const limits = (cache) =>
  [
    ["cache.advice.ram", cache?.hot_limit_bytes],
    ["cache.advice.ssd", cache?.ssd_limit_bytes],
  ].filter(([, limit]) => limit > 0);

/** Doublings of a MiB are said as such: 16 MiB, 2 GiB. */
function size(number) {
  const units = ["MiB", "GiB", "TiB"];
  let value = number / 2 ** 20;
  while (value >= 1024 && units.length > 1) {
    value /= 1024;
    units.shift();
  }
  return `${value} ${units[0]}`;
}

function line(name, part, kind) {
  const bar = element("div", { class: "bar", "aria-hidden": "true" }, element("div"));
  bar.firstElementChild.style.width = `${part * 100}%`;
  return element(
    "div",
    { class: `advice-line ${kind}`.trim() },
    element("dt", {}, name),
    element("dd", {}, bar, element("span", {}, percent(part))),
  );
}
