// A control for each kind of setting, and how values are written in it.

import { element, setText } from "./dom.js";
import { has, t } from "./i18n.js";

/** The default in words. */
export function defaultText(name, setting) {
  return has(`settings.preset.${name}`) ? t(`settings.preset.${name}`) : setting.default;
}

/** A value as people write it: also how it is given in a variable or a flag. */
export function shown(setting, value, separator = ", ") {
  if (value === null || value === undefined) return t(setting.kind === "secret" ? "settings.key.none" : "settings.unset");
  switch (setting.kind) {
    case "list":
      return Array.isArray(value) ? value.join(separator) || t("settings.none") : value;
    case "pairs":
      return typeof value === "object" ? pairs(value, separator) || t("settings.none") : value;
    case "secret":
      return t("settings.key.set");
    default:
      return String(value);
  }
}

const pairs = (value, separator) =>
  Object.entries(value)
    .map((pair) => pair.join("="))
    .join(separator);

/** What stands in a text field; nothing for what is not set. */
function written(setting, value) {
  if (value === null || value === undefined) return "";
  if (setting.kind === "list") return value.join(", ");
  if (setting.kind === "pairs") return pairs(value, ", ");
  return String(value);
}

/**
 * {node, value(), changed(), set(value), keep(setting), invalid(bool), focus()}
 *
 * `value()` is what to send: null stands for the default. `keep` takes over what was saved.
 */
export function makeControl(name, setting, options) {
  if (setting.kind === "switch") return makeSwitch(name, setting, options);
  if (setting.kind === "choice") {
    return name === "gdn_snapshot_storage" ? makeCards(name, setting, options) : makeSelect(name, setting, options);
  }
  return setting.kind === "secret" ? makeSecret(name, setting, options) : makeField(name, setting, options);
}

const names = ({ labelledby, describedby, locked }) => ({
  "aria-labelledby": labelledby,
  "aria-describedby": describedby,
  disabled: locked ? "" : null,
});

/** The part that all have: `read` gives the value to send, `write` puts one in. */
function control(node, inputs, setting, read, write) {
  let before = setting;
  let cleared = false; // back to the default, whatever that will be
  write(setting.value);
  let kept = read(); // so that what is typed back is no change
  for (const kind of ["input", "change"]) {
    node.addEventListener(kind, () => (cleared = false), { capture: true });
  }
  const value = () => (cleared ? null : read());
  return {
    node,
    value,
    changed: () => (value() === null ? before.source !== "default" : value() !== kept),
    set(next) {
      cleared = next === null && before.source !== "default";
      write(next ?? undefined);
    },
    keep(next) {
      before = next;
      cleared = false;
      write(next.value);
      kept = read();
    },
    invalid: (is) => inputs.forEach((input) => input.setAttribute("aria-invalid", is)),
    focus: () => inputs[0].focus(),
  };
}

function makeField(name, setting, options) {
  const numeric = ["whole", "number"].includes(setting.kind);
  const input = element("input", {
    type: "text",
    name,
    inputmode: numeric ? "decimal" : null,
    placeholder: defaultText(name, setting),
    spellcheck: "false",
    class: numeric || setting.kind === "size" ? "short" : null,
    ...names(options),
  });
  input.addEventListener("input", options.onChange);
  const unit = numeric && setting.unit;
  const node = element(
    "div",
    { class: "control" },
    input,
    unit && element("span", { class: "unit" }, t(`settings.unit.${setting.unit}`)),
  );
  const read = () => {
    const text = input.value.trim();
    if (text === "") return null;
    return numeric && Number.isFinite(Number(text)) ? Number(text) : text;
  };
  const write = (value) => {
    input.value = written(setting, value);
  };
  return control(node, [input], setting, read, write);
}

function makeSwitch(name, setting, options) {
  const input = element("input", { type: "checkbox", name, role: "switch", ...names(options) });
  const word = element("span", { class: "word" });
  const say = () => setText(word, t(input.checked ? "settings.on" : "settings.off"));
  input.addEventListener("change", () => {
    say();
    options.onChange();
  });
  const node = element("label", { class: "control toggle" }, input, word);
  const write = (value) => {
    input.checked = value === undefined ? setting.default === "true" : value;
    say();
  };
  return control(node, [input], setting, () => input.checked, write);
}

function makeSelect(name, setting, options) {
  const select = element("select", { name, ...names(options) });
  for (const choice of setting.constraints.choices) {
    select.append(element("option", { value: choice }, choiceText(name, choice)));
  }
  select.addEventListener("change", options.onChange);
  const node = element("div", { class: "control" }, select);
  const write = (value) => {
    select.value = value ?? setting.default;
  };
  return control(node, [select], setting, () => select.value, write);
}

function choiceText(name, choice) {
  const key = `settings.choice.${name}.${choice}`;
  return has(key) ? `${choice} – ${t(key)}` : choice;
}

/** One card for each choice, where what it means is worth a sentence. */
function makeCards(name, setting, options) {
  const inputs = setting.constraints.choices.map((choice) =>
    element("input", { type: "radio", name, value: choice, disabled: options.locked ? "" : null }),
  );
  const node = element(
    "div",
    { class: "choices", role: "radiogroup", "aria-labelledby": options.labelledby, "aria-describedby": options.describedby },
    ...inputs.map((input) =>
      element(
        "label",
        {},
        input,
        element("span", { class: "choice-name" }, input.value),
        element("span", { class: "help" }, t(`settings.choice.${name}.${input.value}`)),
      ),
    ),
  );
  node.addEventListener("change", options.onChange);
  const read = () => inputs.find((input) => input.checked)?.value ?? null;
  const write = (value) => {
    for (const input of inputs) input.checked = input.value === (value ?? setting.default);
  };
  return control(node, inputs, setting, read, write);
}

/** A key is never shown. Blank means as it is. */
function makeSecret(name, setting, options) {
  let state = setting;
  let removed = false;
  const input = element("input", { type: "password", name, autocomplete: "new-password", ...names(options) });
  const remove = element("button", { class: "quiet", type: "button" }, t("settings.key.remove"));
  const show = () => {
    const is = state.value !== null;
    input.placeholder = t(removed ? "settings.key.removed" : is ? "settings.key.replace" : "settings.key.none");
    remove.hidden = !is || removed || options.locked;
  };
  input.addEventListener("input", () => {
    removed = false;
    show();
    options.onChange();
  });
  remove.addEventListener("click", () => {
    removed = true;
    input.value = "";
    show();
    options.onChange();
  });
  show();
  return {
    node: element("div", { class: "control" }, input, remove),
    value: () => input.value.trim() || null,
    changed: () => removed || input.value !== "",
    set(value) {
      input.value = "";
      removed = value === null && state.value !== null;
      show();
    },
    keep(next) {
      state = next;
      removed = false;
      input.value = "";
      show();
    },
    invalid: (is) => input.setAttribute("aria-invalid", is),
    focus: () => input.focus(),
  };
}
