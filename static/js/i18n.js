// The page's texts in its language, from the catalogues that its template was made from as well.

export const language = document.documentElement.lang;

const texts = new Map();
const plurals = new Intl.PluralRules(language);

/** Load the catalogues of these pages, and the common one. Everything else comes after it. */
export async function ready(...pages) {
  await Promise.all(["common", ...pages].map(load));
}

async function load(page) {
  const answer = await fetch(`/static/i18n/${page}.${language}.json`);
  if (!answer.ok) throw new Error(`no texts: ${page}.${language}`);
  for (const [key, text] of Object.entries(await answer.json())) texts.set(key, text);
}

/** A text that may have forms for numbers: `key.one`, `key.other`, chosen by `values.count`. */
function find(key, values) {
  const form = texts.get(key) ?? texts.get(`${key}.${plurals.select(Number(values.count))}`);
  const text = form ?? texts.get(`${key}.other`);
  if (text === undefined) console.error(`no text: ${key}`);
  return text ?? key;
}

export const has = (key) => texts.has(key);

/** The text of a key, with `{name}` replaced by `values.name`. */
export function t(key, values = {}) {
  return nodes(key, values).join("");
}

/** The same in pieces, for values that are elements: `node.append(...nodes(key, { link }))`. */
export function nodes(key, values = {}) {
  const pieces = find(key, values).split(/\{(\w+)\}/);
  return pieces.map((piece, index) => (index % 2 ? show(values[piece]) : piece)).filter((p) => p !== "");
}

const number = new Intl.NumberFormat(language);
const show = (value) => (typeof value === "number" ? number.format(value) : value);
