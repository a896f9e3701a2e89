// How a conversation looks: what was said, and below each answer what it cost.

import { element } from "./dom.js";
import { count, duration, percent, ratio, span } from "./format.js";
import { has, t } from "./i18n.js";
import { markdown } from "./markdown.js";

const THOUGHT = /^\s*<think>([\s\S]*?)(?:<\/think>|$)/;

/** What somebody thought, and what they said then. */
export function parted({ text, thinking }) {
  const inText = THOUGHT.exec(text);
  if (!inText) return { thought: thinking, said: text };
  return { thought: thinking + inText[1], said: text.slice(inText[0].length) };
}

function button(text, onClick) {
  const made = element("button", { class: "quiet", type: "button" }, text);
  made.addEventListener("click", onClick);
  return made;
}

export function userTurn(turn, onEdit) {
  return element(
    "article",
    { class: "turn user", "aria-label": t("chat.you") },
    element("div", { class: "said" }, turn.text),
    element("div", { class: "buttons" }, button(t("chat.edit"), onEdit)),
  );
}

/** An answer; `update()` shows what came meanwhile. */
export class AnswerTurn {
  node = element("article", { class: "turn", "aria-label": t("chat.model_said") });
  #turn;
  #answer = element("div", { class: "answer" });
  #tries = element("div", { class: "tries" });
  #buttons = element("div", { class: "buttons" });
  #copy;
  #isOpen = null;

  constructor(turn, { onAgain }) {
    this.#turn = turn;
    this.#copy = button(t("common.copy"), () => this.#copyText());
    this.#buttons.append(button(t("chat.again"), onAgain), this.#copy);
    this.node.append(this.#answer, this.#tries, this.#buttons);
  }

  update({ isRunning }) {
    const { thought, said } = parted(this.#turn);
    const nodes = markdown(said);
    if (isRunning) (nodes.at(-1)?.matches("p") ? nodes.at(-1) : nodes[nodes.push(element("p")) - 1]).classList.add("caret");
    else if (!said && !this.#turn.tools.length && !this.#turn.problem) nodes.push(element("p", { class: "soft" }, t("chat.nothing")));
    if (thought) nodes.unshift(this.#thought(thought, said, isRunning));
    for (const call of this.#turn.tools) {
      nodes.push(element("pre", {}, element("code", {}, JSON.stringify(call, null, 2))));
    }
    if (this.#turn.problem) {
      nodes.push(element("p", { class: "note", "data-level": "bad" }, this.#turn.problem));
    }
    this.#answer.replaceChildren(...nodes);
    this.#tries.replaceChildren(...this.#turn.tries.map((one, index) => tryRow(one, index)));
    this.#buttons.hidden = isRunning;
  }

  #thought(thought, said, isRunning) {
    const node = element(
      "details",
      {},
      element("summary", {}, isRunning && !said ? t("chat.thinks") : t("chat.thought")),
      element("div", {}, thought.trim()),
    );
    // As the reader left it; open while there is nothing else to read.
    node.open = this.#isOpen ?? (isRunning && !said);
    node.querySelector("summary").addEventListener("click", () => (this.#isOpen = !node.open));
    return node;
  }

  async #copyText() {
    await navigator.clipboard.writeText(parted(this.#turn).said);
    this.#copy.textContent = t("common.copied");
  }
}

function tryRow({ finish, usage, omlx, saved }, index) {
  if (!usage) return element("div", { class: "try" }, element("span"), element("span", {}, t("chat.stopped")));
  const all = usage.prompt_tokens;
  const cached = usage.prompt_tokens_details.cached_tokens;
  const bar = element("div", { class: "bar", "aria-hidden": "true" }, element("div"));
  bar.firstElementChild.style.width = `${ratio(cached, all) * 100}%`;
  const speed = omlx?.decode_ms > 0 && (usage.completion_tokens - 1) / (omlx.decode_ms / 1000);
  const ended = omlx?.reuse_ended;
  const reason = ended && has(`common.reuse.${ended.reason}`) && t(`common.reuse.${ended.reason}.help`);
  const words = element(
    "div",
    { class: "words", title: reason ? t("chat.reuse", { reason, token: ended.token }) : null },
    index > 0 && element("span", {}, t("chat.try", { number: index + 1 })),
    element("strong", {}, t("chat.cached", { part: percent(ratio(cached, all)) })),
    element("span", {}, t("chat.prompt", { cached, all })),
    omlx && element("strong", {}, t("chat.ttft", { time: duration(omlx.ttft_ms) })),
    cached > 0 && saved !== null && element("span", { title: t("chat.saved.help") }, t("chat.saved", { time: span(saved) })),
    speed > 0 && element("span", {}, t("chat.speed", { speed: count(Math.round(speed)) })),
    element("span", {}, t("chat.generated", { count: usage.completion_tokens })),
    finish === "length" && element("span", {}, t("chat.length")),
  );
  return element("div", { class: "try" }, bar, words);
}
