// The connect page: addresses, what to tell each client, and a try of each dialect.

import { send } from "./api.js";
import { clients } from "./clients.js";
import { byId, element, setText } from "./dom.js";
import { getJson } from "./feed.js";
import { count, duration } from "./format.js";
import { has, ready, t } from "./i18n.js";

const COPIED_MS = 1500;
const RETRY_MS = 2000;

await ready("connect");

function copyButton(text, what) {
  const button = element(
    "button",
    { class: "quiet copy", type: "button", "aria-label": t("connect.copy", { what }) },
    t("common.copy"),
  );
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = t("common.copied");
    setText(byId("announcer"), t("common.copied"));
    setTimeout(() => (button.textContent = t("common.copy")), COPIED_MS);
  });
  return button;
}

// ── addresses ───────────────────────────────────────────────────────────────

function showAddresses({ model, aliases, context, api_key: key }) {
  const { origin } = location;
  const rows = [
    ["openai", `${origin}/v1`, true],
    ["anthropic", origin, true],
    ["model", model, true],
    aliases.length > 0 && ["aliases", aliases.join(", "), false],
    ["context", count(context), false],
    ["key", key ? "••••••••" : t("connect.key.none"), false],
  ];
  byId("addresses").replaceChildren(
    ...rows.filter(Boolean).map(([name, value, canCopy]) => {
      const label = t(`connect.address.${name}`);
      const shown = element("dd", {}, element("code", {}, value));
      if (canCopy) shown.append(copyButton(value, label));
      return element("div", {}, element("dt", {}, label), shown);
    }),
  );
  setText(byId("key-help"), key ? t("connect.key.help") : t("connect.key.open"));
}

// ── clients ─────────────────────────────────────────────────────────────────

function showClients(facts) {
  const all = clients({
    origin: location.origin,
    model: facts.model,
    context: facts.context,
    needsKey: facts.api_key !== null,
  });
  const tabs = all.map((client) =>
    element(
      "button",
      { type: "button", role: "tab", id: `tab-${client.id}`, "aria-controls": "client" },
      client.name,
    ),
  );
  const choose = (index, isFocused) => {
    tabs.forEach((tab, other) => {
      tab.setAttribute("aria-selected", String(other === index));
      tab.tabIndex = other === index ? 0 : -1;
    });
    if (isFocused) tabs[index].focus();
    history.replaceState(null, "", `#${all[index].id}`);
    showClient(all[index]);
  };
  tabs.forEach((tab, index) => {
    tab.addEventListener("click", () => choose(index, false));
    tab.addEventListener("keydown", (event) => {
      const next = { ArrowDown: index + 1, ArrowRight: index + 1, ArrowUp: index - 1, ArrowLeft: index - 1, Home: 0, End: -1 }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      choose((next + tabs.length) % tabs.length, true);
    });
  });
  byId("clients").replaceChildren(...tabs);
  choose(Math.max(0, all.findIndex(({ id }) => `#${id}` === location.hash)), false);
}

function showClient({ id, name, snippets }) {
  const help = `connect.client.${id}`;
  byId("client").setAttribute("aria-labelledby", `tab-${id}`);
  byId("client").replaceChildren(
    ...(has(help) ? [element("p", {}, t(help))] : []),
    ...snippets.map(({ file, code }) =>
      element(
        "div",
        { class: "snippet" },
        element(
          "div",
          { class: "snippet-head" },
          element("span", {}, file === "shell" ? t("connect.shell") : element("code", {}, file)),
          copyButton(code, `${name}, ${file}`),
        ),
        element("pre", {}, element("code", {}, code)),
      ),
    ),
  );
}

// ── trying it ───────────────────────────────────────────────────────────────

function dialects(model) {
  const messages = [{ role: "user", content: "Hi" }];
  return [
    ["/v1/chat/completions", { model, messages, max_tokens: 1 }],
    ["/v1/messages", { model, messages, max_tokens: 1 }],
    ["/v1/responses", { model, input: "Hi", max_output_tokens: 16 }],
  ];
}

function showTests({ model }) {
  byId("tests").replaceChildren(
    ...dialects(model).map(([path, body]) => {
      const result = element("span", { class: "chip", role: "status", hidden: "" });
      const label = t("connect.try.label", { path });
      const button = element("button", { class: "quiet", type: "button", "aria-label": label }, t("connect.try.send"));
      button.addEventListener("click", async () => {
        button.disabled = true;
        const [level, text] = await tried(path, body);
        button.disabled = false;
        result.dataset.level = level;
        result.textContent = text;
        result.hidden = false;
      });
      return element("li", {}, element("code", {}, path), button, result);
    }),
  );
}

async function tried(path, body) {
  const started = performance.now();
  try {
    await send("POST", `/admin/api${path}`, body);
    return ["ok", t("connect.try.answered", { time: duration(performance.now() - started) })];
  } catch (problem) {
    return ["bad", problem.message];
  }
}

// ── beginning ───────────────────────────────────────────────────────────────

async function begin() {
  let facts;
  try {
    facts = await getJson("/admin/api/connect");
  } catch {
    byId("banner").textContent = t("connect.loading");
    byId("banner").hidden = false;
    setTimeout(begin, RETRY_MS);
    return;
  }
  byId("banner").hidden = true;
  showAddresses(facts);
  showClients(facts);
  showTests(facts);
}

begin();
