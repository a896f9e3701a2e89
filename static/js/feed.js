// One stream of events from the server: closed while the tab is hidden, opened again when it shows.

const SILENT_MS = 6000;
const RETRY_MS = 2000;

/**
 * Listen to the server. Handlers: onOpen(), onState("live" | "lost" | "paused"), and for each
 * event its data, parsed: onStats, onRequest, onCapture, onSettings; all of these may be left out.
 */
export function listen({ onOpen, onState, onStats, onRequest, onCapture, onSettings }) {
  const handlers = { stats: onStats, request: onRequest, capture: onCapture, settings: onSettings };
  let source = null;
  let heardAt = 0;
  let retry = 0;

  function heard(handler) {
    return (event) => {
      heardAt = Date.now();
      onState("live");
      handler?.(JSON.parse(event.data));
    };
  }

  function open() {
    close();
    heardAt = Date.now();
    source = new EventSource("/admin/events");
    source.addEventListener("open", onOpen);
    for (const [event, handler] of Object.entries(handlers)) {
      if (handler) source.addEventListener(event, heard(handler));
    }
    source.addEventListener("error", () => {
      onState("lost");
      // The browser tries again by itself, except after an answer that is no stream.
      if (source?.readyState === EventSource.CLOSED) refused();
    });
  }

  async function refused() {
    close();
    retry = setTimeout(open, RETRY_MS);
    try {
      const answer = await fetch("/admin/api/stats");
      if (answer.status === 401) location.reload(); // to the login page
    } catch {
      // no server at all; the next try will tell
    }
  }

  function close() {
    clearTimeout(retry);
    source?.close();
    source = null;
  }

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      close();
      onState("paused");
    } else {
      open();
    }
  });
  setInterval(() => {
    if (source && Date.now() - heardAt > SILENT_MS) onState("lost");
  }, 1000);
  if (!document.hidden) open();
}

export async function getJson(path) {
  const answer = await fetch(path, { headers: { Accept: "application/json" } });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}
