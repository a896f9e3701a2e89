// Requests that change something, and what the server says when it refuses.

import { t } from "./i18n.js";

/** What went wrong, with the server's own words. `status` is 0 when there was no answer. */
export class ApiError extends Error {
  constructor(status, { message, code = null, param = null }) {
    super(message);
    Object.assign(this, { status, code, param });
  }
}

/** The answer as JSON. Throws ApiError. A lost login leads to the login page. */
export async function send(method, path, body, options = {}) {
  const answer = await request(method, path, body, options);
  return answer.json();
}

/** The answer itself, once it is known to be good: for streams. */
export async function request(method, path, body, options = {}) {
  let answer;
  try {
    answer = await fetch(path, {
      method,
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      ...options,
    });
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new ApiError(0, { message: t("common.unreachable") });
  }
  if (answer.ok) return answer;
  if (answer.status === 401) location.assign("/admin/login");
  throw new ApiError(answer.status, await refusal(answer));
}

async function refusal(answer) {
  try {
    return (await answer.json()).error;
  } catch {
    return { message: `${answer.status} ${answer.statusText}` };
  }
}
