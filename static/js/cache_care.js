// Verifying every file, with its progress; and clearing a tier, after a question.

import { confirmed } from "./confirm.js";
import { byId, element, setText } from "./dom.js";
import { getJson } from "./feed.js";
import { bytes, duration } from "./format.js";
import { t } from "./i18n.js";

const PROGRESS_MS = 300;
const LISTED = 50;

export class ClearAndVerify {
  #stats = null;
  #send;
  #onChange;
  #stop = null;

  constructor({ send, onChange }) {
    this.#send = send;
    this.#onChange = onChange;
    byId("verify").addEventListener("click", () => this.#verify());
    byId("verify-stop").addEventListener("click", () => this.#stop?.abort());
    for (const button of document.querySelectorAll("[data-clear]")) {
      button.addEventListener("click", () => this.#clear(button.dataset.clear));
    }
  }

  show(stats) {
    this.#stats = stats;
    const isOff = stats.cache.tier_state === "off";
    byId("verify").disabled = isOff || this.#stop !== null;
    document.querySelector('[data-clear="ssd"]').disabled = isOff;
  }

  #say(text, level = "ok") {
    byId("care-note").dataset.level = level;
    setText(byId("care-note"), text);
  }

  // ── clearing ──────────────────────────────────────────────────────────────

  async #clear(tier) {
    const cache = this.#stats?.cache;
    if (!cache) return;
    const size = tier === "hot" ? bytes(cache.hot_bytes) : bytes(cache.ssd_bytes);
    const parts = tier === "hot" ? cache.blocks_cached : cache.ssd_files;
    const agreed = await confirmed({
      title: t(`cache.clear.${tier}.title`),
      text: t(`cache.clear.${tier}.text`, { size, parts }),
      yes: t(`cache.clear.${tier}.yes`, { size }),
    });
    if (!agreed) return;
    try {
      const done = await this.#send("POST", "/admin/api/cache/clear", { tier });
      this.#say(
        t("cache.cleared", {
          size: bytes(done.freed_bytes),
          blocks: done.freed_blocks,
          kept: done.kept_in_use,
        }),
      );
    } catch (problem) {
      this.#say(problem.message, "bad");
    }
    this.#onChange();
  }

  // ── verifying ─────────────────────────────────────────────────────────────

  async #verify() {
    this.#stop = new AbortController();
    byId("verify").disabled = true;
    byId("bad-files").hidden = true;
    byId("verifying").hidden = false;
    this.#say("");
    this.#progress(0);
    const asking = setInterval(() => this.#askProgress(), PROGRESS_MS);
    try {
      const { signal } = this.#stop;
      this.#verified(await this.#send("POST", "/admin/api/cache/verify", {}, { signal }));
    } catch (problem) {
      if (problem.name === "AbortError") this.#say(t("cache.verify.stopped"));
      else this.#say(problem.message, "bad");
    }
    clearInterval(asking);
    this.#stop = null;
    byId("verifying").hidden = true;
    byId("verify").disabled = false;
  }

  async #askProgress() {
    try {
      const { files } = await getJson("/admin/api/cache/verify");
      if (files !== null) this.#progress(files);
    } catch {
      // the next one may come through
    }
  }

  #progress(files) {
    const all = Math.max(files, this.#stats?.cache.ssd_files ?? 0, 1);
    byId("verify-bar").value = files / all;
    setText(byId("verify-count"), t("cache.verify.progress", { files, all }));
  }

  #verified(found) {
    const bad = [...found.corrupt, ...found.unreadable, ...found.orphans];
    const values = { files: found.files, size: bytes(found.bytes), time: duration(found.seconds * 1000) };
    if (!bad.length) this.#say(t("cache.verify.sound", values));
    else {
      this.#say(
        t("cache.verify.bad", {
          ...values,
          corrupt: found.corrupt_files,
          unreadable: found.unreadable_files,
          unreachable: found.unreachable_files,
        }),
        found.corrupt_files ? "bad" : "warn",
      );
    }
    const list = byId("bad-files");
    list.hidden = !bad.length;
    const rows = bad.slice(0, LISTED).map(({ file, reason }) =>
      element("li", {}, element("code", {}, file), ` ${reason}`),
    );
    if (bad.length > LISTED) {
      rows.push(element("li", {}, t("cache.tree.left_out", { count: bad.length - LISTED })));
    }
    list.replaceChildren(...rows);
  }
}
