// Every setting: where its value comes from, what is in force, and changing it.
// The server judges: the page repeats its sentences at the fields, and believes what it confirms.

import { ApiError, send } from "./api.js";
import { byId, element, setText } from "./dom.js";
import { bytes, clock, count, duration } from "./format.js";
import { has, nodes, ready, t } from "./i18n.js";
import { codecPreview } from "./settings_codecs.js";
import { defaultText, makeControl, shown } from "./settings_controls.js";

const API = "/admin/api/settings";
const CHECK_AFTER_MS = 350;

const rows = new Map(); // name -> what is on the page for it
let data = null;
let checking = 0;

// ── building ─────────────────────────────────────────────────────────────────

async function load() {
  try {
    const answer = await fetch(API);
    if (answer.status === 401) location.assign("/admin/login");
    if (!answer.ok) throw new ApiError(answer.status, { message: `${answer.status}` });
    data = await answer.json();
  } catch {
    setText(byId("banner"), t("common.unreachable"));
    byId("banner").hidden = false;
    return;
  }
  build();
  showAround();
  if (data.self_test?.state === "running") runSelfTest();
}

function build() {
  const form = byId("form");
  const sections = Map.groupBy(Object.entries(data.settings), ([, row]) => row.section);
  for (const [section, entries] of sections) {
    const title = element("h2", { id: `title-${section}` }, t(`settings.section.${section}`));
    const card = element(
      "section",
      { class: "card", id: `section-${section}`, "aria-labelledby": title.id },
      title,
      element("p", { class: "help section-help" }, t(`settings.section.${section}.help`)),
    );
    for (const [name, setting] of entries) card.append(makeRow(name, setting));
    if (section === "recurrent") {
      card.append(codecPreview(data.model, () => data.settings.gdn_sidecar_state_dtype.value));
    }
    form.append(card);
    byId("sections").append(
      element("a", { href: `#section-${section}` }, t(`settings.section.${section}`)),
    );
  }
}

const label = (name) => (has(`settings.name.${name}`) ? t(`settings.name.${name}`) : name);

function makeRow(name, setting) {
  const locked = setting.locked_by !== null;
  const parts = {
    chips: element("p", { class: "chips" }),
    hint: element("p", { class: "hint", id: `hint-${name}` }),
    error: element("p", { class: "error", id: `error-${name}` }),
    warning: element("p", { class: "note", "data-level": "warn" }),
    reset: element("button", { class: "link-button", type: "button" }, t("settings.reset")),
  };
  const help = has(`settings.about.${name}`) ? t(`settings.about.${name}`) : setting.description;
  const title = element("span", { class: "name", id: `name-${name}` }, label(name));
  const control = makeControl(name, setting, {
    labelledby: title.id,
    describedby: `about-${name} hint-${name} error-${name}`,
    locked,
    onChange: () => edited(name),
  });
  const node = element(
    "div",
    { class: "setting", id: name, "data-name": name },
    element(
      "div",
      { class: "about" },
      title,
      element("code", {}, name),
      element("p", { class: "help", id: `about-${name}` }, help),
    ),
    element("div", { class: "value" }, control.node, parts.error, parts.warning, parts.hint, parts.chips),
  );
  const row = { name, node, control, ...parts, words: `${name} ${label(name)} ${help}`.toLowerCase() };
  row.reset.addEventListener("click", () => {
    control.set(null);
    edited(name);
  });
  rows.set(name, row);
  showState(row);
  showWarning(row);
  return node;
}

// ── one setting ──────────────────────────────────────────────────────────────

/** Where its value comes from, when a change takes effect, and what is in force. */
function showState(row) {
  const setting = data.settings[row.name];
  const chips = [
    element("span", { class: "chip source", "data-source": setting.source }, sourceText(setting)),
  ];
  if (setting.needs) {
    chips.push(element("span", { class: "chip", "data-level": "warn" }, t("settings.needs.restart")));
  } else if (setting.confirmed === null) {
    chips.push(element("span", { class: "chip", "data-level": "warn" }, t("settings.unconfirmed")));
  }
  chips.push(element("span", { class: "when" }, t(`settings.apply.${setting.apply}`)));
  if (setting.source !== "default" && setting.locked_by === null) chips.push(row.reset);
  row.chips.replaceChildren(...chips);
  row.node.toggleAttribute("data-locked", setting.locked_by !== null);
  showHint(row);
}

function sourceText(setting) {
  const by = setting.locked_by;
  return by === null ? t(`settings.source.${setting.source}`) : t(`settings.source.${setting.source}`, { by });
}

function showHint(row) {
  const setting = data.settings[row.name];
  const hints = [];
  if (setting.locked_by !== null) {
    hints.push(nodes("settings.locked", { by: element("code", {}, setting.locked_by) }));
  }
  const isSaid = row.node.dataset.saved !== undefined;
  if (setting.needs && !isSaid) hints.push([t("settings.running", { value: shown(setting, setting.running) })]);
  else if (!setting.needs && comesTo(setting)) hints.push([t("settings.running", { value: comesTo(setting) })]);
  if (row.name === "gdn_ssd_pending_max_size" && data.model.checkpoint_bytes && setting.held) {
    const holds = Math.floor(setting.held / data.model.checkpoint_bytes);
    const size = bytes(data.model.checkpoint_bytes);
    hints.push([t("settings.holds", { count: holds, size })]);
  }
  if (setting.source !== "default") {
    hints.push([t("settings.default", { value: defaultText(row.name, setting) })]);
  }
  row.hint.replaceChildren(...hints.map((hint) => element("span", {}, ...hint)));
}

/** What a share, or "auto", comes to now; nothing where the value says it itself. */
function comesTo(setting) {
  if (setting.held === null || (setting.source !== "default" && !/%|auto/.test(setting.value))) return null;
  return typeof setting.held === "number" ? bytes(setting.held) : setting.held;
}

/** What is chosen costs something: said where it is chosen, before it is saved. */
function showWarning(row) {
  if (row.name !== "gdn_sidecar_state_dtype") return;
  const codec = row.control.value() ?? data.settings[row.name].default;
  setText(row.warning, codec === "fp32" ? "" : t("settings.codecs.warning", { codec }));
}

function showError(row, message) {
  setText(row.error, message ?? "");
  row.control.invalid(Boolean(message));
}

// ── changes ──────────────────────────────────────────────────────────────────

const changed = () => [...rows.values()].filter((row) => row.control.changed());

function body() {
  return Object.fromEntries(changed().map((row) => [row.name, row.control.value()]));
}

function edited(name) {
  const row = rows.get(name);
  row.node.toggleAttribute("data-changed", row.control.changed());
  delete row.node.dataset.saved;
  if (!row.control.changed()) showError(row, null);
  showWarning(row);
  setText(byId("save-error"), "");
  showChanges();
  clearTimeout(checking);
  checking = setTimeout(check, CHECK_AFTER_MS);
}

/** What would change, before it does. */
function showChanges() {
  const list = changed();
  byId("save-bar").hidden = !list.length;
  setText(byId("save-title"), t("settings.changes", { count: list.length }));
  byId("changes").replaceChildren(
    ...list.map((row) => {
      const setting = data.settings[row.name];
      const next = row.control.value();
      return element(
        "li",
        {},
        element("a", { href: `#${row.name}` }, label(row.name)),
        element("del", {}, shown(setting, setting.value)),
        element("span", { class: "arrow", "aria-label": t("settings.becomes") }, "→"),
        element("ins", {}, next === null ? defaultText(row.name, setting) : shown(setting, next)),
        element("span", { class: "when" }, t(`settings.apply.${setting.apply}`)),
      );
    }),
  );
}

/** Ask the server what it would say. */
async function check() {
  const changes = body();
  if (!Object.keys(changes).length) return;
  try {
    const { errors } = await send("POST", `${API}/validate`, changes);
    for (const row of changed()) showError(row, errors[row.name]?.message);
  } catch (problem) {
    setText(byId("save-error"), problem.message);
  }
}

function discard() {
  for (const row of changed()) {
    row.control.set(data.settings[row.name].value);
    edited(row.name);
  }
  byId("main").focus();
}

async function save() {
  clearTimeout(checking);
  const list = changed();
  if (!list.length) return;
  byId("save").disabled = true;
  setText(byId("save-error"), "");
  try {
    const answer = await send("PATCH", API, body());
    Object.assign(data.settings, answer.settings);
    data.warnings = answer.warnings;
    for (const row of list) saved(row);
    showChanges();
    showAround();
    tell(answer);
    if (answer.self_test?.state === "running") runSelfTest();
  } catch (problem) {
    refused(problem);
  } finally {
    byId("save").disabled = false;
  }
}

function saved(row) {
  const setting = data.settings[row.name];
  row.control.keep(setting);
  showError(row, null);
  row.node.removeAttribute("data-changed");
  row.node.dataset.saved = setting.needs ?? (setting.confirmed ? "confirmed" : "unconfirmed");
  showState(row);
  const inForce = comesTo(setting) ?? shown(setting, setting.running);
  const text = t(`settings.saved.${row.node.dataset.saved}`, { value: inForce });
  const level = row.node.dataset.saved === "confirmed" ? "ok" : "warn";
  row.hint.prepend(element("span", { class: "verdict", "data-level": level }, text));
}

function tell(answer) {
  const later = answer.needs_reload.length + answer.needs_restart.length;
  const text = [t("settings.told.applied", { count: answer.applied.length })];
  if (later) text.push(t("settings.told.later", { count: later }));
  setText(byId("announcer"), text.join(" "));
}

function refused(problem) {
  const row = rows.get(problem.param);
  if (!row) {
    setText(byId("save-error"), problem.message);
    return;
  }
  showError(row, problem.message);
  setText(byId("save-error"), t("settings.refused", { name: label(row.name) }));
  row.node.scrollIntoView({ block: "center" });
  row.control.focus();
}

// ── around them ──────────────────────────────────────────────────────────────

function showAround() {
  byId("where").replaceChildren(...nodes("settings.where", { file: element("code", {}, data.file) }));
  setText(byId("file-error"), data.file_error ?? "");
  byId("file-error").hidden = !data.file_error;
  byId("warnings").replaceChildren(...data.warnings.map((text) => element("li", {}, text)));
  byId("warnings").hidden = !data.warnings.length;
  if (data.self_test && data.self_test.state !== "running") showSelfTest(data.self_test);
}

function filter() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  let any = false;
  for (const row of rows.values()) {
    row.node.hidden = !words.every((word) => row.words.includes(word));
    any ||= !row.node.hidden;
  }
  for (const card of byId("form").children) {
    card.hidden = !card.querySelector(".setting:not([hidden])");
  }
  byId("nothing").hidden = any;
}

async function runSelfTest() {
  const button = byId("run-self-test");
  button.disabled = true;
  byId("self-test").dataset.level = "wait";
  setText(byId("self-test"), t("settings.test.running"));
  try {
    showSelfTest(await send("POST", `${API}/self-test`, {}));
  } catch (problem) {
    byId("self-test").dataset.level = "warn";
    setText(byId("self-test"), problem.message);
  } finally {
    button.disabled = false;
  }
}

function showSelfTest(outcome) {
  const line = byId("self-test");
  line.dataset.level = { ok: "ok", failed: "bad", skipped: "wait" }[outcome.state];
  if (outcome.state === "ok") {
    const values = {
      time: clock(outcome.at),
      tokens: count(outcome.tokens),
      ram: bytes(outcome.ram_bytes),
      file: bytes(outcome.file_bytes),
      took: duration(outcome.ms),
    };
    const where = outcome.compared ? "both" : outcome.ram_bytes ? "ram" : "file";
    setText(line, t(`settings.test.ok.${where}`, values));
  } else {
    const detail = outcome.detail ? ` (${outcome.detail})` : "";
    setText(line, t(`settings.test.reason.${outcome.reason}`) + detail);
  }
}

// ── to take along ────────────────────────────────────────────────────────────

const setByHand = () =>
  Object.values(data.settings).filter((row) => row.source !== "default" && row.kind !== "secret");

const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

const isEmpty = (value) => typeof value === "object" && !Object.keys(value).length;

const plain = (row) => (isEmpty(row.value) ? "''" : quoted(shown(row, row.value, ",")));

const asVariables = () => setByHand().map((row) => `export ${row.env}=${plain(row)}`).join("\n");

function asFlags() {
  const flags = setByHand().map((row) => {
    if (row.kind !== "switch") return `${row.flag} ${plain(row)}`;
    return row.value ? row.flag : row.flag.replace("--", "--no-");
  });
  return ["omlx serve", ...flags].join(" ");
}

async function copy(button, text) {
  await navigator.clipboard.writeText(text);
  const before = button.textContent;
  setText(button, t("common.copied"));
  setTimeout(() => setText(button, before), 1500);
}

// ── start ────────────────────────────────────────────────────────────────────

await ready("settings");
await load();
byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  save();
});
byId("discard").addEventListener("click", discard);
byId("search").addEventListener("input", filter);
byId("run-self-test").addEventListener("click", runSelfTest);
// A browser only lends the clipboard to pages that came encrypted, or from this machine.
for (const name of ["copy-env", "copy-cli"]) byId(name).hidden = !navigator.clipboard;
byId("copy-env").addEventListener("click", () => copy(byId("copy-env"), asVariables()));
byId("copy-cli").addEventListener("click", () => copy(byId("copy-cli"), asFlags()));
addEventListener("beforeunload", (event) => {
  if (changed().length) event.preventDefault();
});
