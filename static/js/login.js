// Sends the key as JSON: forms of other sites can't do that.

import { byId } from "./dom.js";
import { ready, t } from "./i18n.js";

await ready("login");

const field = byId("key");
const problem = byId("login-error");

byId("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  problem.textContent = "";
  problem.textContent = await signIn(field.value);
  field.setAttribute("aria-invalid", "true");
  field.select();
});

/** What to tell; nothing is left to tell when the key is right. */
async function signIn(key) {
  let answer;
  try {
    answer = await fetch("/admin/login", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ key }),
    });
  } catch {
    return t("common.unreachable");
  }
  if (answer.ok) {
    location.assign("/admin");
    return "";
  }
  if (answer.status === 429) {
    return t("login.wait", { count: Number(answer.headers.get("Retry-After")) });
  }
  return answer.status === 401 ? t("login.wrong") : (await answer.json()).error.message;
}
