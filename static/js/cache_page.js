// The cache page: the prefix tree and what is known of a node, counters, verifying, clearing.

import { send } from "./api.js";
import { showAdvice } from "./cache_advice.js";
import { ClearAndVerify } from "./cache_care.js";
import { showModels } from "./cache_models.js";
import { showProbe } from "./cache_probe.js";
import { byId, element, setText } from "./dom.js";
import { getJson, listen } from "./feed.js";
import { bytes, clock, count, day } from "./format.js";
import { ready, t } from "./i18n.js";
import { showCapture, showLink } from "./live.js";
import { below, inOrder } from "./prefix_tree.js";
import { nameOf, TreeView, where } from "./tree_view.js";

const SETTLE_MS = 700;
const DEPTH = 2048;
const LISTED = 300;

await ready("cache", "overview");

let stats = null;

/** How the text of the block begins, if texts are kept; asked for once a selection. */
const text = { hash: null, shown: null };

// ── the node that is selected ───────────────────────────────────────────────

function showNode(node) {
  byId("node-empty").hidden = Boolean(node);
  byId("node").hidden = !node;
  byId("zoom-in").hidden = !node || tree.zoomed === node;
  byId("zoom-out").hidden = !tree.zoomed;
  setText(byId("node-title"), node ? nameOf(node) : t("cache.node.none"));
  if (!node) return;
  if (text.hash !== node.hash) loadText(node.hash);
  const hash = (text) => element("span", { class: "mono" }, text);
  const kin = below(node).filter((other) => other !== node && !other.checkpoint);
  const tokens = kin.reduce((sum, other) => sum + other.tokens, 0);
  const rows = [
    ["span", t("cache.node.span.value", { tokens: node.tokens, start: node.start, end: node.end })],
    ["text", text.shown ?? "…"],
    ["where", where(node)],
    node.place && ["why", t(`cache.place.${node.place}`)],
    node.checkpoint && stats && ["codec", stats.gdn.codec],
    ["size", bytes(node.bytes)],
    ["refs", node.refs ? t("cache.node.held", { count: node.refs }) : t("cache.node.free")],
    ["used", node.last_used === null ? t("cache.node.never") : `${day(node.last_used)} ${clock(node.last_used)}`],
    !node.checkpoint && ["below", t("cache.node.below.value", { blocks: kin.length, tokens })],
    ["hash", hash(node.hash)],
    ["parent", node.up && !node.checkpoint ? parentButton(node) : hash(node.parent)],
  ];
  byId("node").replaceChildren(
    ...rows.filter(Boolean).map(([name, value]) =>
      element("div", {}, element("dt", {}, t(`cache.field.${name}`)), element("dd", {}, value)),
    ),
  );
}

async function loadText(hash) {
  Object.assign(text, { hash, shown: null });
  try {
    const found = await getJson(`/admin/api/cache/nodes/${hash}`);
    if (text.hash === hash) text.shown = found.text ?? t("cache.text.private");
  } catch {
    return; // it is gone, and the next tree is without it
  }
  if (tree.selected?.hash === hash) showNode(tree.selected);
}

function parentButton(node) {
  const button = element("button", { class: "quiet mono", type: "button" }, node.parent.slice(0, 16));
  button.addEventListener("click", () => tree.select(node.parent));
  return button;
}

const tree = new TreeView(byId("tree"), byId("ruler"), showNode);
byId("zoom-in").addEventListener("click", () => tree.zoom(tree.selected?.hash));
byId("zoom-out").addEventListener("click", () => tree.zoom(null));

// ── the tree ────────────────────────────────────────────────────────────────

let shown = "";

async function load() {
  let answer;
  try {
    answer = await getJson(`/admin/api/cache/tree?depth=${DEPTH}`);
    showAdvice(await getJson("/admin/api/cache/advice"), stats?.cache);
  } catch {
    return; // no model yet, or no connection: the feed says so and asks again
  }
  const text = JSON.stringify(answer);
  if (text === shown) return;
  shown = text;
  const { nodes, left_out: leftOut } = answer;
  byId("tree").hidden = nodes.length === 0;
  byId("ruler").hidden = nodes.length === 0;
  byId("tree-keys").hidden = nodes.length === 0;
  byId("tree-empty").hidden = nodes.length > 0;
  byId("left-out").hidden = leftOut === 0;
  setText(byId("left-out"), t("cache.tree.left_out", { count: leftOut }));
  const blocks = nodes.filter((node) => !node.checkpoint);
  setText(
    byId("tree-about"),
    nodes.length
      ? t("cache.tree.about", {
          blocks: blocks.length,
          tokens: blocks.reduce((sum, node) => sum + node.tokens, 0),
          checkpoints: nodes.length - blocks.length,
        })
      : t("cache.tree.help"),
  );
  tree.show(nodes);
  if (!byId("list-view").hidden) showList();
}

function showList() {
  const cell = (name, kind, ...children) =>
    element("td", { "data-label": t(`cache.column.${name}`), class: kind }, ...children);
  const all = inOrder(tree.forest.roots);
  const rows = all.slice(0, LISTED).map((node) =>
    element(
      "tr",
      {},
      cell("node", "mono", nameOf(node)),
      cell("from", "num", count(node.checkpoint ? node.end : node.start)),
      cell("tokens", "num", count(node.tokens)),
      cell("where", null, where(node)),
      cell("size", "num", bytes(node.bytes)),
      cell("refs", "num", count(node.refs)),
      cell("used", null, node.last_used === null ? "–" : clock(node.last_used)),
    ),
  );
  byId("list-rows").replaceChildren(...rows);
  byId("list-more").hidden = all.length <= LISTED;
  setText(byId("list-more"), t("cache.tree.left_out", { count: Math.max(0, all.length - LISTED) }));
}

byId("list-button").addEventListener("click", () => {
  const view = byId("list-view");
  view.hidden = !view.hidden;
  byId("list-button").setAttribute("aria-expanded", String(!view.hidden));
  setText(byId("list-button"), view.hidden ? t("cache.list.show") : t("cache.list.hide"));
  if (!view.hidden) showList();
});
byId("refresh").addEventListener("click", load);

let settling = 0;
function loadSoon() {
  clearTimeout(settling);
  settling = setTimeout(load, SETTLE_MS);
}

// ── everything else ─────────────────────────────────────────────────────────

showProbe((path, body) => send("POST", path, body));
const care = new ClearAndVerify({ send, onChange: load });

/** What tells that the tree is another one now. */
const signature = ({ cache, gdn, engine }) =>
  [cache.hot_bytes, cache.ssd_files, cache.pending_bytes, cache.blocks_cached, gdn.checkpoints, engine.running].join();

function onStats(fresh) {
  const isNew = !stats || signature(fresh) !== signature(stats);
  stats = fresh;
  showModels(stats);
  care.show(stats);
  if (isNew) loadSoon();
}

function onCapture(on) {
  showCapture(on);
  if (text.hash) loadText(text.hash);
}

const onState = (state) => showLink(state, stats?.time);

listen({ onOpen: load, onState, onStats, onRequest: loadSoon, onCapture });
