// How the page is connected to the server, and what everybody must know while it is.

import { byId, element, setText } from "./dom.js";
import { clock } from "./format.js";
import { t } from "./i18n.js";

/** `since`: Unix seconds of the numbers that are shown. */
export function showLink(state, since) {
  byId("link").dataset.state = state;
  setText(byId("link-text"), t(`overview.link.${state}`));
  const banner = byId("banner");
  if (state === "lost" && banner.hidden) {
    const words = since ? ` ${t("overview.banner.since", { time: clock(since) })}` : "";
    banner.textContent = t("overview.banner.lost") + words;
  }
  banner.hidden = state !== "lost";
}

/** Texts of prompts are being kept: whoever looks at the page is told. */
export function showCapture(on) {
  let note = byId("capture-note");
  if (!note) {
    note = element("p", { class: "banner capture", id: "capture-note", role: "status" });
    byId("banner").after(note);
  }
  note.hidden = !on;
  note.replaceChildren(on ? t("overview.banner.capture") : "");
}
