// The part of Markdown that models write, as nodes: nothing of a text ever becomes markup.

import { element } from "./dom.js";

const FENCE = /^\s*(```|~~~)/;
const HEADING = /^#{1,6}\s+(.*)$/;
const BULLET = /^\s*[-*+]\s+(.*)$/;
const NUMBER = /^\s*(\d{1,6})[.)]\s+(.*)$/;
const QUOTE = /^>\s?(.*)$/;
const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|\*([^\s*](?:[^*]*[^\s*])?)\*|\[([^\]]+)\]\((https?:[^\s)]+)\)/g;

/** The blocks of a text. One that is still being written is shown as far as it goes. */
export function markdown(text) {
  const lines = text.split("\n");
  const blocks = [];
  let at = 0;
  const take = (pattern) => {
    const found = [];
    for (let match; at < lines.length && (match = pattern.exec(lines[at])); at += 1) found.push(match);
    return found;
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (fence) {
      const from = (at += 1);
      while (at < lines.length && !lines[at].trim().startsWith(fence[1])) at += 1;
      blocks.push(element("pre", {}, element("code", {}, lines.slice(from, at).join("\n"))));
      at += 1;
    } else if (HEADING.test(line)) {
      blocks.push(element("h3", {}, ...inline(HEADING.exec(line)[1])));
      at += 1;
    } else if (BULLET.test(line)) {
      blocks.push(element("ul", {}, ...take(BULLET).map((item) => element("li", {}, ...inline(item[1])))));
    } else if (NUMBER.test(line)) {
      const items = take(NUMBER);
      const list = items.map((item) => element("li", {}, ...inline(item[2])));
      blocks.push(element("ol", { start: items[0][1] }, ...list));
    } else if (QUOTE.test(line)) {
      const quoted = take(QUOTE).map((item) => item[1]);
      blocks.push(element("blockquote", {}, ...inline(quoted.join("\n"))));
    } else if (line.trim() === "") {
      at += 1;
    } else {
      const from = at;
      const ends = (next) => next.trim() === "" || [FENCE, HEADING, BULLET, NUMBER, QUOTE].some((p) => p.test(next));
      while (at < lines.length && (at === from || !ends(lines[at]))) at += 1;
      blocks.push(element("p", {}, ...broken(lines.slice(from, at))));
    }
  }
  return blocks;
}

/** Lines of a paragraph stay lines: models mean them. */
function broken(lines) {
  return lines.flatMap((line, index) => [...(index ? [element("br")] : []), ...inline(line)]);
}

function inline(text) {
  const pieces = [];
  let done = 0;
  for (const match of text.matchAll(INLINE)) {
    pieces.push(text.slice(done, match.index));
    const [whole, , code, bold, italic, label, href] = match;
    if (code !== undefined) pieces.push(element("code", {}, code));
    else if (bold !== undefined) pieces.push(element("strong", {}, ...inline(bold)));
    else if (italic !== undefined) pieces.push(element("em", {}, ...inline(italic)));
    else pieces.push(element("a", { href, target: "_blank", rel: "noopener noreferrer" }, label));
    done = match.index + whole.length;
  }
  pieces.push(text.slice(done));
  return pieces.filter((piece) => piece !== "");
}
