// Where each node of the prefix tree goes: along the tokens from left to right, a row for each
// branch from top to bottom. Numbers only; what is drawn of them is tree_view.js.

/**
 * Nodes as the server lists them, parents first, become a forest. Each gets
 * `start` and `end` (tokens from the beginning of the prompt), `children` (blocks),
 * `checkpoints`, `up` (its parent or null), `row` and `rows` (where, and how many it spans).
 */
export function grow(listed) {
  const nodes = listed.map((node) => ({ ...node, children: [], checkpoints: [], up: null }));
  const byHash = new Map(nodes.map((node) => [node.hash, node]));
  const roots = [];
  for (const node of nodes) {
    const parent = byHash.get(node.parent) ?? null;
    node.start = parent ? parent.end : 0;
    node.end = node.start + node.tokens;
    // A checkpoint is drawn on the block in which it was taken, if that is there.
    node.at = node.checkpoint ? (byHash.get(node.block) ?? parent) : null;
    node.up = node.checkpoint ? node.at : parent;
    if (!node.up) roots.push(node);
    else if (!node.checkpoint) parent.children.push(node);
  }
  // Only now, since a checkpoint may be listed before its block.
  for (const node of nodes) node.at?.checkpoints.push(node);
  let row = 0;
  for (const root of roots) row += place(root, row);
  return { nodes, byHash, roots, rows: row };
}

/** Give a subtree its rows, from `row` on; how many it takes. Chains are long: no recursion. */
function place(root, row) {
  const order = [];
  const ahead = [root];
  while (ahead.length) {
    const node = ahead.pop();
    order.push(node);
    ahead.push(...[...node.children].reverse());
  }
  for (const node of [...order].reverse()) {
    node.rows = node.children.reduce((sum, child) => sum + child.rows, 0) || 1;
  }
  root.row = row;
  for (const node of order) {
    let next = node.row;
    for (const child of node.children) {
      child.row = next;
      next += child.rows;
    }
  }
  return root.rows;
}

/** A node and everything below it. */
export function below(node) {
  const found = [];
  const ahead = [node];
  while (ahead.length) {
    const next = ahead.pop();
    found.push(next);
    ahead.push(...next.children, ...next.checkpoints);
  }
  return found;
}

/** From the beginning of the prompt to this node. */
export function path(node) {
  const found = [];
  for (let next = node; next; next = next.up) found.unshift(next);
  return found;
}

/** Depth first, as people read a tree. */
export function inOrder(roots) {
  const found = [];
  const ahead = [...roots].reverse();
  while (ahead.length) {
    const node = ahead.pop();
    found.push(node);
    ahead.push(...[...node.checkpoints, ...node.children].reverse());
  }
  return found;
}

/** The node that an arrow key leads to; the same one where there is none. */
export function walk(forest, node, key) {
  const siblings = node.up ? node.up.children : forest.roots;
  switch (key) {
    case "ArrowRight":
      return node.children[0] ?? node.checkpoints[0] ?? node;
    case "ArrowLeft":
      return node.up ?? node;
    case "ArrowDown":
    case "ArrowUp": {
      if (node.checkpoint) return node.up ?? node;
      const all = [...siblings.filter((other) => !other.checkpoint), ...(node.up?.checkpoints ?? [])];
      const step = key === "ArrowDown" ? 1 : -1;
      const beside = all[all.indexOf(node) + step];
      return beside ?? cousin(forest, node, step) ?? node;
    }
    case "Home":
      return forest.roots[0];
    case "End":
      return inOrder(forest.roots).at(-1);
    default:
      return node;
  }
}

/** The next branch above or below that is as long, or the end of one that is not. */
function cousin(forest, node, step) {
  const wanted = step > 0 ? node.row + node.rows : node.row - 1;
  const there = forest.nodes.filter(
    (other) => !other.checkpoint && other.row <= wanted && wanted < other.row + other.rows,
  );
  const reaching = there.filter((other) => other.start <= node.start);
  return reaching.sort((one, other) => other.start - one.start)[0] ?? there[0];
}
