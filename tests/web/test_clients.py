"""Clients that people point at a server: a chat, a stream, a tool call, and the usage they show.

They come with the extra ``clients``; without it their tests are skipped. The model says the same to
everybody: it thinks, says something, and calls a tool. Who offers no tool gets the call as text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import talker
from tests.process import Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Items? .* using the .ReadOnly. qualifier:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:litellm"),
]

THOUGHT = "hm, so"
CALL = json.dumps(talker.LOOK)
SAID = f"Let me look.\n<tool_call>\n{CALL}\n</tool_call>"
"""To those who offer no tool."""
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": CITY}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = talker.build(tmp_path_factory.mktemp("model"))
    # Blocks of a few tokens: the prompts here are short, and part of what is told is what is kept.
    options = ("--paged-cache-block-size", "16")
    with Server(model, tmp_path_factory.mktemp("home"), *options) as running:
        yield running.wait_ready()


# ── LiteLLM ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=["openai", "anthropic"])
def completion(
    request: pytest.FixtureRequest, server: Server, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """LiteLLM's one function, for a provider."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it fetches a list of prices
    litellm = pytest.importorskip("litellm")
    provider: str = request.param
    base = server.url + ("/v1" if provider == "openai" else "")

    def ask(text: str, **fields: Any) -> Any:
        return litellm.completion(
            model=f"{provider}/talker",
            api_base=base,
            api_key="not-needed",
            messages=[{"role": "user", "content": text}],
            max_tokens=64,
            **fields,
        )

    return ask


def test_litellm_chats_and_shows_what_was_cached(completion: Callable[..., Any]) -> None:
    completion("hello, LiteLLM")
    answer = completion("hello, LiteLLM")

    message, usage = answer.choices[0].message, answer.usage
    assert message.content == SAID
    assert message.reasoning_content == THOUGHT
    assert answer.choices[0].finish_reason == "stop"
    assert 0 < usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_litellm_streams(completion: Callable[..., Any]) -> None:
    chunks = list(completion("hello", stream=True, stream_options={"include_usage": True}))

    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == SAID
    assert chunks[-1].usage.completion_tokens > 0


def test_litellm_calls_a_tool(completion: Callable[..., Any]) -> None:
    answer = completion("hello", tools=[TOOL])

    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "look"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert answer.choices[0].finish_reason == "tool_calls"


def test_litellm_knows_our_refusals(completion: Callable[..., Any]) -> None:
    import litellm

    with pytest.raises(litellm.ContextWindowExceededError):  # pyright: ignore
        completion("hello " * 3000)


# ── LangChain ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=["chat", "responses", "messages"])
def model(request: pytest.FixtureRequest, server: Server) -> Any:
    """LangChain's model of a chat, which speaks one of three dialects."""
    if request.param == "messages":
        messages = pytest.importorskip("langchain_anthropic")
        return messages.ChatAnthropic(
            model="talker", base_url=server.url, api_key="not-needed", max_tokens=64
        )
    openai = pytest.importorskip("langchain_openai")
    return openai.ChatOpenAI(
        model="talker",
        base_url=f"{server.url}/v1",
        api_key="not-needed",
        max_tokens=64,
        stream_usage=True,
        use_responses_api=request.param == "responses",
    )


def test_langchain_chats_and_shows_what_was_cached(model: Any) -> None:
    model.invoke("hello, LangChain")
    answer = model.invoke("hello, LangChain")

    assert answer.text == SAID
    usage = answer.usage_metadata
    assert usage["input_token_details"]["cache_read"] == usage["input_tokens"] - 1
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_langchain_streams(model: Any) -> None:
    whole, *others = model.stream("hello")
    assert others
    for chunk in others:
        whole += chunk

    assert whole.text == SAID
    assert whole.usage_metadata["output_tokens"] > 0


def test_langchain_calls_a_tool_and_goes_on(model: Any) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    agent = model.bind_tools([TOOL])
    asked = HumanMessage("hello")

    answer = agent.invoke([asked])

    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("look", {"city": "Paris"})
    result = ToolMessage("sunny", tool_call_id=call["id"])
    after = agent.invoke([asked, answer, result])
    usage = after.usage_metadata
    assert usage["input_token_details"]["cache_read"] >= answer.usage_metadata["input_tokens"]


def test_langchain_streams_a_tool_call(model: Any) -> None:
    whole, *others = model.bind_tools([TOOL]).stream("hello")
    for chunk in others:
        whole += chunk

    (call,) = whole.tool_calls
    assert (call["name"], call["args"]) == ("look", {"city": "Paris"})


# ── llm ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def llm_model(
    server: Server, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """As its users name a server: in extra-openai-models.yaml."""
    llm = pytest.importorskip("llm")
    folder = tmp_path_factory.mktemp("llm")
    (folder / "extra-openai-models.yaml").write_text(
        "- model_id: ours\n"
        "  model_name: talker\n"
        f"  api_base: {server.url}/v1\n"
        "  supports_tools: true\n"
    )
    monkeypatch.setenv("LLM_USER_PATH", str(folder))
    return llm.get_model("ours")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_llm_chats_and_shows_what_was_cached(llm_model: Any, stream: bool) -> None:
    llm_model.prompt(f"hello, llm {stream}", stream=stream).text()
    response = llm_model.prompt(f"hello, llm {stream}", stream=stream)

    pieces = list(response)

    assert "".join(pieces) == SAID
    assert (len(pieces) > 1) is stream
    usage = response.usage()
    assert usage.details["prompt_tokens_details"]["cached_tokens"] == usage.input - 1
    assert usage.output > 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_llm_calls_a_tool(llm_model: Any, stream: bool) -> None:
    def look(city: str) -> str:
        """Look out of the window."""
        return f"{city}: sunny"

    response = llm_model.prompt("hello", tools=[look], stream=stream)

    (call,) = response.tool_calls()
    assert (call.name, call.arguments) == ("look", {"city": "Paris"})
    (result,) = response.execute_tool_calls()
    assert result.output == "Paris: sunny"
