// What the cache holds for each model, and what it has done since the start.

import { byId, element, setPairs } from "./dom.js";
import { bytes, count, percent, ratio } from "./format.js";
import { t } from "./i18n.js";

export function showModels({ model, cache, gdn }) {
  const looked = cache.hits + cache.misses;
  const rows = [
    row(
      model.id || t("cache.models.loading"),
      model.namespace,
      count(model.block_size),
      t("cache.models.of", { used: cache.blocks_cached, all: cache.blocks_total }),
      count(cache.ssd_files - cache.incompatible_files),
      bytes(cache.hot_bytes),
      bytes(Math.max(0, cache.ssd_bytes - cache.incompatible_bytes)),
      looked ? percent(ratio(cache.hits, looked)) : "–",
    ),
  ];
  if (cache.incompatible_files > 0) {
    const files = count(cache.incompatible_files);
    rows.push(
      row(t("cache.models.others"), "", "–", "–", files, "–", bytes(cache.incompatible_bytes), "–"),
    );
  }
  fill(byId("models"), rows);

  const rejected = Object.values(cache.rejected_files).reduce((sum, files) => sum + files, 0);
  pairs("block-counters", [
    ["hits", count(cache.hits)],
    ["misses", count(cache.misses)],
    ["shared", count(cache.shared_blocks)],
    ["cow", count(cache.cow_copies)],
    ["evictions_ram", count(cache.evictions_ram)],
    ["free", count(cache.blocks_free)],
  ]);
  pairs("ssd-counters", [
    ["written", bytes(cache.ssd_written_bytes)],
    ["restored", bytes(cache.ssd_restored_bytes)],
    ["pending", t("cache.models.of", { used: bytes(cache.pending_bytes), all: bytes(cache.pending_limit_bytes) })],
    ["stops", count(cache.pending_stops)],
    ["evictions_ssd", count(cache.evictions_ssd)],
    ["damaged", count(cache.corrupt_blocks)],
    ["rejected", count(rejected)],
  ]);
  pairs("state-counters", [
    ["layers", count(model.layers.recurrent)],
    ["storage", t(`cache.storage.${gdn.storage}`)],
    ["codec", gdn.codec],
    ["checkpoints", count(gdn.checkpoints)],
    ["loads", count(gdn.gdn_checkpoint_loads)],
    ["walkbacks", count(gdn.gdn_checkpoint_walkbacks)],
    ["failures", count(gdn.gdn_decode_failures)],
  ]);
}

function pairs(id, rows) {
  setPairs(byId(id), rows.map(([name, value]) => [t(`cache.counter.${name}`), value]));
}

const COLUMNS = ["model", "block", "blocks", "files", "ram_bytes", "ssd_bytes", "hits"];

function row(name, namespace, ...values) {
  const title = namespace && t("cache.models.namespace", { name: namespace });
  return [[name, title], ...values.map((value) => [value, ""])];
}

/** Cells are made once, so that a selection of text survives the next second. */
function fill(body, rows) {
  const text = JSON.stringify(rows);
  if (body.dataset.shown === text) return;
  body.dataset.shown = text;
  body.replaceChildren(
    ...rows.map((cells) =>
      element(
        "tr",
        {},
        ...cells.map(([value, help], index) =>
          element(
            "td",
            { "data-label": t(`cache.column.${COLUMNS[index]}`), class: index ? "num" : "double" },
            value,
            help && element("div", { class: "help" }, help),
          ),
        ),
      ),
    ),
  );
}
