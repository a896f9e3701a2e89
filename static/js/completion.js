// A streamed chat completion, from the bytes to its pieces.

import { ApiError, request } from "./api.js";

/** The API's own route, opened by the login of the administration. */
const PATH = "/admin/api/v1/chat/completions";

/**
 * Ask for an answer. `onPiece({ text, thinking, tools })` for each piece; resolves to the last
 * chunk's `{ id, finish, usage, omlx }`. Throws ApiError, and AbortError once `signal` is aborted.
 */
export async function complete(body, signal, onPiece) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  const answer = await request("POST", PATH, asked, { signal });
  const end = { id: null, finish: null, usage: null, omlx: null };
  for await (const chunk of chunks(answer.body)) {
    if (chunk.error) throw new ApiError(answer.status, chunk.error);
    const choice = chunk.choices?.[0];
    const delta = choice?.delta ?? {};
    const thinking = delta.reasoning_content ?? delta.reasoning ?? "";
    if (delta.content || thinking || delta.tool_calls) {
      onPiece({ text: delta.content ?? "", thinking, tools: delta.tool_calls ?? [] });
    }
    end.id ??= chunk.id;
    end.finish = choice?.finish_reason ?? end.finish;
    end.usage = chunk.usage ?? end.usage;
    end.omlx = chunk.omlx ?? end.omlx;
  }
  return end;
}

/** The JSON of each `data:` line, whatever pieces the bytes come in. */
async function* chunks(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (text + value).split("\n");
    text = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}
