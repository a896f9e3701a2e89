// What a prompt would find in the cache. Nothing is computed, and nothing counted.

import { byId, element } from "./dom.js";
import { count, percent, ratio } from "./format.js";
import { has, t } from "./i18n.js";

export function showProbe(post) {
  byId("probe").addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = byId("probe-text").value;
    const isChat = document.querySelector('input[name="as"]:checked').value === "chat";
    const body = isChat ? { messages: [{ role: "user", content: text }] } : { prompt: text };
    let found;
    try {
      found = result(await post("/admin/api/cache/probe", body));
    } catch (problem) {
      found = [element("p", { class: "note", "data-level": "bad" }, problem.message)];
    }
    byId("probe-found").replaceChildren(...found);
  });
}

function result({ prompt_tokens: all, cached_ram: ram, cached_ssd: ssd, reuse_ended: ended }) {
  const part = (kind, tokens) => {
    const node = element("div", { class: kind });
    node.style.width = `${ratio(tokens, all) * 100}%`;
    return node;
  };
  const reason = has(`common.reuse.${ended.reason}`) ? t(`common.reuse.${ended.reason}.help`) : ended.reason;
  return [
    element("p", {}, t("cache.probe.found", { part: percent(ratio(ram + ssd, all)), cached: ram + ssd, all })),
    element(
      "div",
      { class: "bar", "aria-hidden": "true" },
      part("ram", ram),
      part("ssd", ssd),
      element("div", { class: "new" }),
    ),
    element(
      "p",
      { class: "split" },
      ...[
        [t("cache.legend.ram"), ram],
        [t("cache.legend.ssd"), ssd],
        [t("cache.probe.new"), all - ram - ssd],
      ].map(([name, tokens]) => element("span", {}, `${name} ${count(tokens)}`)),
    ),
    element("p", { class: "help" }, t("cache.probe.ended", { token: ended.token, reason })),
  ];
}
