// What everything together takes of the memory that it may take.

import { byId, element, setText } from "./dom.js";
import { bytes, ratio } from "./format.js";
import { t } from "./i18n.js";

const PARTS = [
  ["weights", "weights_bytes"],
  ["rows", "live_kv_bytes"],
  ["hot", "hot_bytes"],
  ["reserve", "reserve_bytes"],
];

export function showMemory(memory) {
  const place = byId("memory");
  place.hidden = memory.total_bytes === 0;
  if (place.hidden) return;
  if (!place.children.length) build(place);
  setText(place.querySelector(".tier-share"), t("overview.memory.total", { total: bytes(memory.total_bytes) }));
  for (const [kind, field] of PARTS) {
    place.querySelector(`.bar .${kind}`).style.width = `${ratio(memory[field], memory.total_bytes) * 100}%`;
    setText(place.querySelector(`li.${kind} span`), t(`overview.memory.${kind}`, { size: bytes(memory[field]) }));
  }
}

function build(place) {
  const bar = element("div", { class: "bar", "aria-hidden": "true" });
  const words = element("ul", { class: "memory-words" });
  for (const [kind] of PARTS) {
    bar.append(element("div", { class: kind }));
    words.append(element("li", { class: kind }, element("i", { class: `key ${kind}` }), element("span")));
  }
  const head = element("div", { class: "tier-head" });
  head.append(element("span", {}, t("overview.memory")), element("span", { class: "tier-share" }));
  place.append(head, bar, words);
}
