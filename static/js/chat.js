// The chat page: a conversation that is kept in this page alone, and what each answer cost.

import { complete } from "./completion.js";
import { byId, element, setText } from "./dom.js";
import { getJson } from "./feed.js";
import { percent, ratio } from "./format.js";
import { ready, t } from "./i18n.js";
import { AnswerTurn, parted, userTurn } from "./turns.js";

const REQUESTS_ASKED = 20;

await ready("chat");

/** What was said: `{ role: "user", text }`, `{ role: "assistant", text, thinking, tools, tries, problem }`. */
let turns = [];
let views = [];
let running = null;

// ── what is asked ───────────────────────────────────────────────────────────

function number(id) {
  const value = byId(id).valueAsNumber;
  return Number.isNaN(value) ? undefined : value;
}

/** The tools that may be called, or undefined. Throws what JSON.parse does. */
function tools() {
  const text = byId("tools").value.trim();
  return text ? JSON.parse(text) : undefined;
}

function asked(before) {
  const messages = before.map((turn) =>
    turn.role === "user"
      ? { role: "user", content: turn.text }
      : { role: "assistant", content: parted(turn).said.trim() },
  );
  const system = byId("system").value.trim();
  if (system) messages.unshift({ role: "system", content: system });
  const thinking = byId("thinking").value;
  return {
    model: byId("model").value || undefined,
    messages,
    max_tokens: number("max-tokens"),
    temperature: number("temperature"),
    tools: tools(),
    chat_template_kwargs: thinking ? { enable_thinking: thinking === "true" } : undefined,
  };
}

// ── asking ──────────────────────────────────────────────────────────────────

/** Answer what was said before `turn`, into `turn`. */
async function answer(turn) {
  let body;
  try {
    body = asked(turns.slice(0, turns.indexOf(turn)));
    setText(byId("tools-problem"), "");
  } catch (problem) {
    setText(byId("tools-problem"), problem.message);
    turn.problem = t("chat.tools.bad");
    show();
    return;
  }
  Object.assign(turn, { text: "", thinking: "", tools: [], problem: null });
  const view = views[turns.indexOf(turn)];
  running = new AbortController();
  showRunning();
  const draw = onFrame(() => view.update({ isRunning: running !== null }));
  draw();
  try {
    const end = await complete(body, running.signal, (piece) => {
      turn.text += piece.text;
      turn.thinking += piece.thinking;
      addTools(turn.tools, piece.tools);
      draw();
    });
    turn.tries.push({ ...end, saved: null });
    tell(end);
    addSaved(turn.tries.at(-1), draw);
  } catch (problem) {
    if (problem.name === "AbortError") turn.tries.push({ finish: "stopped", usage: null });
    else turn.problem = problem.message;
  }
  running = null;
  showRunning();
  view.update({ isRunning: false });
}

/** What the cache saved is known to the statistics, a moment later. */
async function addSaved(one, draw) {
  try {
    const { requests } = await getJson(`/admin/api/requests?limit=${REQUESTS_ASKED}`);
    one.saved = requests.find(({ id }) => id === one.id)?.saved_ms ?? null;
    draw();
  } catch {
    // the answer is there without it
  }
}

/** Calls of tools come in pieces, each with the place of its call. */
function addTools(calls, pieces) {
  for (const { index = calls.length, id, function: part = {} } of pieces) {
    calls[index] ??= { id, name: "", arguments: "" };
    calls[index].name += part.name ?? "";
    calls[index].arguments += part.arguments ?? "";
  }
}

/** At most once a frame, and with everything that came until then. */
function onFrame(work) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      const isAtEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 80;
      work();
      if (isAtEnd) scrollTo({ top: document.documentElement.scrollHeight });
    });
  };
}

function tell({ usage }) {
  const part = percent(ratio(usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens));
  setText(byId("announcer"), t("chat.finished", { part }));
}

function say(text) {
  turns.push({ role: "user", text }, { role: "assistant", text: "", thinking: "", tools: [], tries: [], problem: null });
  show();
  answer(turns.at(-1));
}

/** The same again: what came after goes, and the cache has the rest. */
function again(turn) {
  if (running) return;
  turns = turns.slice(0, turns.indexOf(turn) + 1);
  show();
  answer(turn);
}

/** Take a message back, to say it differently: the conversation forks there. */
function edit(turn) {
  if (running) return;
  turns = turns.slice(0, turns.indexOf(turn));
  show();
  byId("text").value = turn.text;
  byId("text").focus();
}

// ── showing ─────────────────────────────────────────────────────────────────

function show() {
  views = turns.map((turn) =>
    turn.role === "user"
      ? { node: userTurn(turn, () => edit(turn)), update() {} }
      : new AnswerTurn(turn, { onAgain: () => again(turn) }),
  );
  for (const view of views) view.update({ isRunning: false });
  byId("log").replaceChildren(...views.map((view) => view.node));
  byId("welcome").hidden = turns.length > 0;
  byId("new").disabled = turns.length === 0;
}

function showRunning() {
  byId("stop").hidden = !running;
  byId("send").hidden = Boolean(running);
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("text").value.trim();
  if (!text || running) return;
  byId("text").value = "";
  say(text);
});
byId("text").addEventListener("keydown", (event) => {
  // Enter also ends a word that is being composed, as in Chinese.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", () => {
  running?.abort();
  turns = [];
  show();
  byId("text").focus();
});
for (const idea of document.querySelectorAll("[data-idea]")) {
  idea.addEventListener("click", () => say(idea.dataset.idea));
}
addEventListener("beforeunload", () => running?.abort());

try {
  const { model, aliases } = await getJson("/admin/api/connect");
  byId("model").replaceChildren(...[model, ...aliases].map((id) => element("option", { value: id }, id)));
} catch {
  // without a choice the served model answers
}
show();
