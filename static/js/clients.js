// How each client is told where the server is. Code is the same in every language.

/**
 * `{ origin, model, context, needsKey }` becomes a list of `{ id, name, snippets }`; a snippet is
 * `{ file, code }`: the name of a file, or of the place it is for.
 */
export function clients({ origin, model, context, needsKey }) {
  const api = `${origin}/v1`;
  const shellKey = needsKey ? "$OMLX_API_KEY" : "not-needed";
  const python = needsKey ? 'os.environ["OMLX_API_KEY"]' : '"not-needed"';
  const imports = needsKey ? "import os\n\n" : "";
  const shell = (code) => ({ file: "shell", code });

  return [
    {
      id: "curl",
      name: "curl",
      snippets: [
        shell(`curl ${api}/chat/completions \\
  -H "Authorization: Bearer ${shellKey}" \\
  -H "Content-Type: application/json" \\
  -d '{
    "model": "${model}",
    "messages": [{"role": "user", "content": "Hello"}],
    "stream": true
  }'`),
      ],
    },
    {
      id: "openai",
      name: "OpenAI SDK",
      snippets: [
        {
          file: "Python",
          code: `${imports}from openai import OpenAI

client = OpenAI(base_url="${api}", api_key=${python})
answer = client.chat.completions.create(
    model="${model}",
    messages=[{"role": "user", "content": "Hello"}],
)
print(answer.choices[0].message.content)
print(answer.usage.prompt_tokens_details.cached_tokens)`,
        },
        {
          file: "JavaScript",
          code: `import OpenAI from "openai";

const client = new OpenAI({
  baseURL: "${api}",
  apiKey: ${needsKey ? "process.env.OMLX_API_KEY" : '"not-needed"'},
});
const answer = await client.chat.completions.create({
  model: "${model}",
  messages: [{ role: "user", content: "Hello" }],
});
console.log(answer.choices[0].message.content);`,
        },
      ],
    },
    {
      id: "anthropic",
      name: "Anthropic SDK",
      snippets: [
        {
          file: "Python",
          code: `${imports}from anthropic import Anthropic

client = Anthropic(base_url="${origin}", api_key=${python})
answer = client.messages.create(
    model="${model}",
    max_tokens=512,
    messages=[{"role": "user", "content": "Hello"}],
)
print(answer.content[0].text)
print(answer.usage.cache_read_input_tokens)`,
        },
      ],
    },
    {
      id: "claude-code",
      name: "Claude Code",
      snippets: [
        shell(`export ANTHROPIC_BASE_URL=${origin}
export ANTHROPIC_AUTH_TOKEN=${shellKey}
export ANTHROPIC_MODEL=${model}
export ANTHROPIC_SMALL_FAST_MODEL=${model}
export CLAUDE_CODE_ATTRIBUTION_HEADER=0
export CLAUDE_CODE_AUTO_COMPACT_WINDOW=${context}
claude`),
      ],
    },
    {
      id: "codex",
      name: "Codex",
      snippets: [
        {
          file: "~/.codex/config.toml",
          code: `model = "${model}"
model_provider = "omlx"
model_context_window = ${context}

[model_providers.omlx]
name = "omlx"
base_url = "${api}"
wire_api = "responses"${needsKey ? '\nenv_key = "OMLX_API_KEY"' : ""}`,
        },
      ],
    },
    {
      id: "langchain",
      name: "LangChain",
      snippets: [
        {
          file: "Python",
          code: `${imports}from langchain_openai import ChatOpenAI

model = ChatOpenAI(base_url="${api}", api_key=${python}, model="${model}")
print(model.invoke("Hello").content)`,
        },
      ],
    },
    {
      id: "llm",
      name: "llm",
      snippets: [
        {
          file: "extra-openai-models.yaml",
          code: `- model_id: ${model}
  model_name: ${model}
  api_base: ${api}${needsKey ? "\n  api_key_name: omlx" : ""}`,
        },
        shell(`${needsKey ? 'llm keys set omlx --value "$OMLX_API_KEY"\n' : ""}llm -m ${model} "Hello"`),
      ],
    },
    {
      id: "open-webui",
      name: "Open WebUI",
      snippets: [
        shell(`export OPENAI_API_BASE_URL=${api}
export OPENAI_API_KEY=${shellKey}
open-webui serve`),
      ],
    },
    {
      id: "aider",
      name: "aider",
      snippets: [
        shell(`export OPENAI_API_BASE=${api}
export OPENAI_API_KEY=${shellKey}
aider --model openai/${model}`),
      ],
    },
    {
      id: "continue",
      name: "Continue",
      snippets: [
        {
          file: "~/.continue/config.yaml",
          code: `models:
  - name: ${model}
    provider: openai
    model: ${model}
    apiBase: ${api}
    apiKey: ${needsKey ? "${{ secrets.OMLX_API_KEY }}" : "not-needed"}
    defaultCompletionOptions:
      contextLength: ${context}`,
        },
      ],
    },
    {
      id: "cline",
      name: "Cline",
      snippets: [
        {
          file: "API Provider: OpenAI Compatible",
          code: `Base URL:        ${api}
API Key:         ${needsKey ? "OMLX_API_KEY" : "not-needed"}
Model ID:        ${model}
Context Window:  ${context}`,
        },
      ],
    },
  ];
}
