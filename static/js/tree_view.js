// The prefix tree as a picture that can be clicked and walked with the arrow keys.

import { element } from "./dom.js";
import { count, short } from "./format.js";
import { t } from "./i18n.js";
import { below, grow, path, walk } from "./prefix_tree.js";

const ROW_HEIGHTS = [
  [10, 38],
  [24, 28],
  [Infinity, 18],
];
const TICKS = 4;
const LABEL_HEIGHT = 16;
const CHARACTER = 7.5;
const PADDING = 7;
const DIAMOND = 7;

/** Where a node is, in words. */
export function where(node) {
  const tiers = node.tiers.map((tier) => t(`cache.tier.${tier}`));
  return tiers.length ? tiers.join(", ") : t("cache.tier.waits");
}

export function nameOf(node) {
  const hash = node.hash.slice(0, 8);
  return node.checkpoint ? t("cache.node.checkpoint", { hash }) : t("cache.node.block", { hash });
}

export class TreeView {
  forest = grow([]);
  #place;
  #ruler;
  #onSelect;
  #items = new Map();
  #selected = null;
  #zoomed = null; // hashes, since every refresh brings new nodes

  constructor(place, ruler, onSelect) {
    this.#place = place;
    this.#ruler = ruler;
    this.#onSelect = onSelect;
    place.addEventListener("click", (event) => {
      const item = event.target.closest("[role=treeitem]");
      if (item) this.select(item.dataset.hash);
    });
    place.addEventListener("dblclick", () => this.zoom(this.#selected));
    place.addEventListener("keydown", (event) => this.#key(event));
    place.addEventListener("focus", () => this.selected ?? this.select(this.#first()?.hash));
    new ResizeObserver(() => this.#label()).observe(place);
  }

  get selected() {
    return this.forest.byHash.get(this.#selected) ?? null;
  }

  get zoomed() {
    return this.forest.byHash.get(this.#zoomed) ?? null;
  }

  show(nodes) {
    this.forest = grow(nodes);
    this.#draw();
    this.#onSelect(this.selected);
  }

  select(hash) {
    this.#selected = hash ?? null;
    this.#mark();
    this.#onSelect(this.selected);
  }

  /** Only this node and what is below it; null shows all again. */
  zoom(hash) {
    const node = this.forest.byHash.get(hash);
    this.#zoomed = node?.checkpoint ? (node.up?.hash ?? null) : (node?.hash ?? null);
    this.#draw();
    this.#onSelect(this.selected);
  }

  #first() {
    return this.zoomed ?? this.forest.roots[0];
  }

  #key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Enter") this.zoom(this.#selected);
    else if (event.key === "Escape" && this.#zoomed) this.zoom(null);
    else if (/^(Arrow|Home|End)/.test(event.key) && this.selected) {
      const next = walk(this.forest, this.selected, event.key);
      if (!this.#items.has(next.hash)) return;
      this.select(next.hash);
      this.#items.get(next.hash).scrollIntoView({ block: "nearest", inline: "nearest" });
    } else return;
    event.preventDefault();
  }

  // ── drawing ───────────────────────────────────────────────────────────────

  #draw() {
    const { zoomed, forest } = this;
    const nodes = zoomed ? below(zoomed) : forest.nodes;
    const rows = zoomed ? zoomed.rows : forest.rows;
    const top = zoomed ? zoomed.row : 0;
    const from = zoomed ? zoomed.start : 0;
    const to = Math.max(from + 1, ...nodes.map((node) => node.end));
    const height = ROW_HEIGHTS.find(([most]) => rows <= most)[1];
    const across = (tokens) => ((tokens - from) / (to - from)) * 100;
    this.#items = new Map();
    for (const node of nodes) {
      const item = this.#item(node);
      const { style } = item;
      if (node.checkpoint && node.at) {
        style.left = `${across(node.end)}%`;
        style.top = `${(node.at.row - top + node.at.rows / 2) * height - 1}px`;
      } else {
        style.left = `${across(node.start)}%`;
        style.width = `calc(${across(node.end) - across(node.start)}% - 1px)`;
        style.top = `${(node.row - top) * height}px`;
        style.height = `${node.rows * height - 2}px`;
      }
      this.#items.set(node.hash, item);
    }
    this.#place.style.height = `${rows * height}px`;
    this.#place.replaceChildren(...this.#items.values());
    this.#ticks(from, to);
    this.#mark();
    this.#label();
  }

  #item(node) {
    const siblings = node.up ? [...node.up.checkpoints, ...node.up.children] : this.forest.roots;
    const kinds = ["tree-node", ...node.tiers];
    if (node.checkpoint && node.at) kinds.push("diamond");
    if (!node.tiers.length) kinds.push("waits");
    if (node.refs > 0) kinds.push("held");
    const words = t("cache.node.label", {
      name: nameOf(node),
      tokens: node.tokens,
      start: node.start,
      where: where(node),
    });
    return element("div", {
      id: `node-${node.hash}`,
      class: kinds.join(" "),
      role: "treeitem",
      title: words,
      "data-hash": node.hash,
      "aria-label": node.refs ? `${words}. ${t("cache.node.held", { count: node.refs })}` : words,
      "aria-level": path(node).length,
      "aria-posinset": siblings.indexOf(node) + 1,
      "aria-setsize": siblings.length,
      "aria-selected": "false",
    });
  }

  #mark() {
    const { selected } = this;
    const onPath = new Set(selected ? path(selected).map((node) => node.hash) : []);
    for (const [hash, item] of this.#items) {
      item.classList.toggle("on-path", onPath.has(hash));
      item.setAttribute("aria-selected", String(hash === this.#selected));
    }
    if (this.#items.has(this.#selected)) {
      this.#place.setAttribute("aria-activedescendant", `node-${this.#selected}`);
    } else this.#place.removeAttribute("aria-activedescendant");
  }

  /** Numbers go into the boxes that are large enough for them. */
  #label() {
    for (const [hash, item] of this.#items) {
      const node = this.forest.byHash.get(hash);
      if (node.checkpoint && node.at) continue;
      const held = node.refs > 0 ? ` ×${node.refs}` : "";
      const text = `${count(node.tokens)}${held}`;
      const wide = text.length * CHARACTER + PADDING;
      const hidden = node.checkpoints.some(
        (other) => ((other.end - node.start) / node.tokens) * item.clientWidth < wide + DIAMOND,
      );
      const fits = item.clientWidth > wide + PADDING && item.clientHeight >= LABEL_HEIGHT;
      item.textContent = fits && !hidden ? text : "";
    }
  }

  #ticks(from, to) {
    const ticks = Array.from({ length: TICKS }, (_, index) => index / (TICKS - 1));
    this.#ruler.replaceChildren(
      ...ticks.map((part, index) => {
        const tokens = Math.round(from + part * (to - from));
        const text = index === TICKS - 1 ? t("cache.ruler.tokens", { tokens: short(tokens) }) : short(tokens);
        const tick = element("span", {}, text);
        tick.style.left = `${part * 100}%`;
        return tick;
      }),
    );
  }
}
