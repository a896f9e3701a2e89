// The page is built from text nodes only: no string ever becomes markup.

export const byId = (id) => document.getElementById(id);

/** An element with attributes and children; strings become text, null and false nothing. */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== false));
  return node;
}

/** Set text only where it differs, so that a selection and a screen reader are left in peace. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A list of terms and values; rows are made once and then only their values change. */
export function setPairs(list, pairs) {
  pairs.forEach(([term, value], index) => {
    let row = list.children[index];
    if (!row) {
      row = element("div", {}, element("dt"), element("dd"));
      list.append(row);
    }
    setText(row.children[0], term);
    setText(row.children[1], value);
  });
  while (list.children.length > pairs.length) list.lastElementChild.remove();
}
