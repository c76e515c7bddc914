"""Requests that are sent to both a plain vLLM server and the router."""

from typing import Any, NamedTuple

TEXT = (
    "An agent reads a file, runs a command and waits for the answer. Every round appends a little "
    "to a long context, and nearly all of it was seen before. The storage holds the cache of those "
    "rounds, block by block and layer by layer, and two paths lead from it to the engines."
)

WEATHER = {
    "type": "object",
    "properties": {"unit": {"enum": ["celsius", "kelvin"]}, "dry": {"type": "boolean"}},
    "required": ["unit", "dry"],
    "additionalProperties": False,
}

TOOL = {"name": "weather", "description": "Tells it.", "parameters": WEATHER, "strict": True}

#: What a model writes that calls the tool, as the parser `hermes` expects it.
CALL = r'<tool_call>\n\{"name": "weather", "arguments": \{"unit": "kelvin"\}\}\n</tool_call>'

#: Off for most chats: a random model never ends its thinking of its own accord.
NOT_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}

#: A chat with an answer that begins in the middle of a thought, for which a budget is set.
THINKING: dict[str, Any] = {
    "messages": [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "<think>So"}],
    "add_generation_prompt": False,
    "continue_final_message": True,
    "chat_template_kwargs": {},
    "thinking_token_budget": 5,
}


class Case(NamedTuple):
    """A request by name; ``body`` None: GET."""

    name: str
    path: str
    body: Any = None

    @property
    def method(self) -> str:
        """HTTP method."""
        return "GET" if self.body is None else "POST"


def completion(name: str, **options: Any) -> Case:
    """Return a greedy completion request with token ids in the answer."""
    body = {"prompt": TEXT, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    return Case(f"completion {name}", "/v1/completions", _served(body, options))


def chat(name: str, **options: Any) -> Case:
    """Return a greedy chat request with token ids in the answer."""
    body = {
        "messages": [{"role": "user", "content": TEXT}],
        "max_tokens": 12,
        "temperature": 0,
        "return_token_ids": True,
        **NOT_THINKING,
    }
    return Case(f"chat {name}", "/v1/chat/completions", _served(body, options))


def responses(name: str, **options: Any) -> Case:
    """Return a greedy request of the Responses API."""
    body = {"input": TEXT, "max_output_tokens": 12, "temperature": 0, **NOT_THINKING}
    return Case(f"responses {name}", "/v1/responses", _served(body, options))


def messages(name: str, **options: Any) -> Case:
    """Return a greedy request of the Anthropic API."""
    body = {
        "messages": [{"role": "user", "content": TEXT}],
        "max_tokens": 12,
        "temperature": 0,
        **NOT_THINKING,
    }
    return Case(f"messages {name}", "/v1/messages", _served(body, options))


def _served(body: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return {"model": "tiny", **body, **options}


STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
FUNCTION = {"type": "function", "function": TOOL}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
LONG = {"max_tokens": 60}

GREEDY = completion("greedy")

#: Each of these changes the answer to the greedy request; otherwise the case would show nothing.
CHANGING = [
    completion("seed", seed=11, temperature=1.0),
    completion("seed, top-p, top-k, min-p",
               seed=12, temperature=0.8, top_p=0.9, top_k=40, min_p=0.01),
    completion("presence penalty", presence_penalty=-2),
    completion("frequency penalty", frequency_penalty=-2),
    completion("repetition penalty", repetition_penalty=0.5),
    completion("logit bias", logit_bias={"300": 100}),
    completion("allowed tokens", allowed_token_ids=[300, 301, 302]),
    completion("bad words", bad_words=[" cser", "File"]),
    completion("stop token", logit_bias={"300": 100}, stop_token_ids=[300]),
    completion("end of text", logit_bias={"2": 100}),
    completion("end of text ignored", logit_bias={"2": 100}, ignore_eos=True),
    completion("minimum of tokens", logit_bias={"2": 100}, min_tokens=5),
    completion("stop string", stop=["e"], **LONG),
    completion("repetition detection", logit_bias={"300": 100},
               repetition_detection={"max_pattern_size": 2, "min_count": 3}),
    completion("cut prompt", truncate_prompt_tokens=70),
    completion("JSON schema", response_format=SCHEMA, **LONG),
    completion("JSON object", response_format={"type": "json_object"}),
    completion("regex", structured_outputs={"regex": r"[a-c]{4,9}!"}),
    completion("choice", structured_outputs={"choice": ["prefill", "decode"]}),
    completion("grammar", structured_outputs={"grammar": 'root ::= "PE" | "DE" root'}),
]  # fmt: skip

SAMPLING = [
    GREEDY,
    completion("of token ids", prompt=list(range(100, 240))),
    completion("of two prompts", prompt=[TEXT, TEXT[:120]]),
    completion("of one token", max_tokens=1),
    completion("of one token, stateful", max_tokens=1, seed=4, temperature=1.0),
    completion("streamed", **STREAMED),
    completion("usage in every chunk", stream=True, stream_interval=4,
               stream_options={"include_usage": True, "continuous_usage_stats": True}),
    completion("echo", echo=True),
    completion("echo with logprobs", echo=True, logprobs=2),
    completion("echo alone", echo=True, max_tokens=0, logprobs=1),
    completion("logprobs", logprobs=3),
    completion("logprobs streamed", logprobs=3, **STREAMED),
    completion("logprobs of the sampled token", logprobs=0),
    completion("logprobs as token ids", logprobs=2, return_tokens_as_token_ids=True),
    completion("logprobs of named tokens", logprobs=1, logprob_token_ids=[5, 300, 17]),
    completion("prompt logprobs", prompt_logprobs=2),
    completion("seed and two samples", seed=13, temperature=1.0, n=2),
    completion("seed and two samples streamed", seed=13, temperature=1.0, n=2, **STREAMED),
    completion("special tokens kept", logit_bias={"2": 100}, ignore_eos=True,
               skip_special_tokens=False, spaces_between_special_tokens=False),
    completion("stop string included", stop=["e"], include_stop_str_in_output=True, **LONG),
    completion("stop string streamed", stop=["e"], **LONG, **STREAMED),
    completion("cache salt", cache_salt="tenant"),
    completion("priority", priority=3),
    completion("beam search", use_beam_search=True, n=2),
]  # fmt: skip

STRUCTURED = [
    completion("structural tag", response_format={
        "type": "structural_tag",
        "structures": [{"begin": "<w>", "schema": WEATHER, "end": "</w>"}],
        "triggers": ["<w>"],
    }),
    chat("JSON schema", response_format=SCHEMA, **LONG),
    chat("JSON schema streamed", response_format=SCHEMA, **LONG, **STREAMED),
    chat("choice with logprobs", structured_outputs={"choice": ["PE", "DE"]}, logprobs=True),
    messages("JSON schema", output_config={
        "format": {"type": "json_schema", "schema": WEATHER}}, **LONG),
    responses("JSON schema", max_output_tokens=60, text={
        "format": {"type": "json_schema", "name": "weather", "schema": WEATHER}}),
]  # fmt: skip

CHATS = [
    chat("greedy"),
    chat("streamed", **STREAMED),
    chat("two samples streamed", seed=5, temperature=1.0, n=2, **STREAMED),
    chat("logprobs", logprobs=True, top_logprobs=2),
    chat("logprobs streamed", logprobs=True, top_logprobs=2, **STREAMED),
    chat("logprobs of named tokens", logprobs=True, logprob_token_ids=[5, 300]),
    chat("prompt logprobs", prompt_logprobs=1),
    chat("stop string", stop="e", **LONG),
    chat("penalties and seed", seed=3, temperature=1.0, presence_penalty=0.5),
    chat("echo", echo=True),
    chat("continued", messages=[{"role": "user", "content": TEXT},
                                {"role": "assistant", "content": "Two"}],
         add_generation_prompt=False, continue_final_message=True),
    chat("beam search", use_beam_search=True, n=2),
    chat("tools offered", tools=[FUNCTION]),
    chat("tool called", tools=[FUNCTION], structured_outputs={"regex": CALL}, max_tokens=80),
    chat("tool called, streamed", tools=[FUNCTION], structured_outputs={"regex": CALL},
         max_tokens=80, **STREAMED),
    chat("tool required", tools=[FUNCTION], tool_choice="required", **LONG),
    chat("tool required, streamed", tools=[FUNCTION], tool_choice="required",
         **LONG, **STREAMED),
    chat("tool named", tools=[FUNCTION], **LONG,
         tool_choice={"type": "function", "function": {"name": "weather"}}),
    chat("thinking", chat_template_kwargs={}, **LONG),
    chat("thinking on a budget", **THINKING),
    chat("thinking on a budget streamed", **THINKING, **STREAMED),
    chat("thinking, then JSON", chat_template_kwargs={}, response_format=SCHEMA, **LONG),
    Case("batch of chats", "/v1/chat/completions/batch", {
        "model": "tiny", "max_tokens": 6, "temperature": 0,
        "messages": [[{"role": "user", "content": TEXT}], [{"role": "user", "content": "Go."}]],
    }),
    responses("greedy"),
    responses("streamed", stream=True),
    responses("of messages", input=[{"role": "user", "content": TEXT}], instructions="Be brief."),
    responses("logprobs", top_logprobs=2, include=["message.output_text.logprobs"]),
    responses("tool required", tools=[{"type": "function", **TOOL}], tool_choice="required",
              max_output_tokens=60),
    responses("thinking", chat_template_kwargs={}),
    messages("greedy"),
    messages("streamed", stream=True),
    messages("of blocks, with a system prompt", system="Be brief.",
             messages=[{"role": "user", "content": [{"type": "text", "text": TEXT}]}]),
    messages("stop sequence", stop_sequences=["e"], **LONG),
    messages("tool required", tool_choice={"type": "any"}, **LONG, tools=[
        {"name": "weather", "strict": True, "input_schema": WEATHER}]),
    messages("thinking", chat_template_kwargs={}),
]  # fmt: skip

ENGINELESS = [
    Case("models", "/v1/models"),
    Case("version", "/version"),
    Case("health", "/health"),
    Case("ping", "/ping"),
    Case("load", "/load"),
    Case("tokenize text", "/tokenize", {"prompt": TEXT, "return_token_strs": True}),
    Case("tokenize chat", "/tokenize", {"messages": [{"role": "user", "content": TEXT}]}),
    Case("detokenize", "/detokenize", {"tokens": list(range(100, 140))}),
    Case("count tokens", "/v1/messages/count_tokens", {
        "model": "tiny", "messages": [{"role": "user", "content": TEXT}]}),
    Case("generative scoring", "/generative_scoring", {
        "model": "tiny", "query": TEXT, "items": [" two", " paths"],
        "label_token_ids": [300, 301]}),
    Case("invocation", "/invocations", {
        "model": "tiny", "prompt": TEXT, "max_tokens": 4, "temperature": 0}),
]  # fmt: skip

REFUSED = [
    completion("negative max_tokens", max_tokens=-1),
    completion("prompt too long", prompt=[5] * 5000),
    completion("prompt and answer too long", max_tokens=5000),
    completion("temperature", temperature=9),
    completion("top_p", top_p=0),
    completion("penalty", presence_penalty=3),
    completion("logprobs", logprobs=21),
    completion("prompt logprobs streamed", prompt_logprobs=1, stream=True),
    completion("n", n=0),
    completion("two greedy samples", n=2),
    completion("more named logprobs than are known", logprobs=1, logprob_token_ids=[99999]),
    completion("no prompt", prompt=""),
    completion("suffix", suffix="x"),
    completion("unknown token", prompt=[99999]),
    completion("unknown model", model="nope"),
    completion("unknown biased token", logit_bias={"99999": 1}),
    completion("stop", stop=[""]),
    completion("min above max", min_tokens=20),
    completion("empty salt", cache_salt=""),
    completion("regex", structured_outputs={"regex": "["}),
    completion("grammar", structured_outputs={"grammar": "root ::= ("}),
    completion("two grammars", structured_outputs={"regex": "a", "choice": ["b"]}),
    completion("schema", structured_outputs={"json": {"type": "nothing"}}),
    completion("stream options alone", stream_options={"include_usage": True}),
    completion("embeddings", prompt_embeds="AAAA"),
    completion("body", prompt={"a": 1}),
    Case("completion of a broken body", "/v1/completions", b'{"model": "tiny", '),
    Case("completion without a model's prompt", "/v1/completions", {}),
    chat("no messages", messages=[]),
    chat("top logprobs alone", top_logprobs=2),
    chat("no role", messages=[{"content": "x"}]),
    chat("an image", messages=[{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]),
    chat("a tool that is not there", tools=[FUNCTION],
         tool_choice={"type": "function", "function": {"name": "nothing"}}),
    chat("a tool choice without tools", tool_choice="required"),
    chat("unknown model", model="nope"),
    responses("an unknown response", previous_response_id="resp_nothing"),
    responses("unknown model", model="nope"),
    Case("a response that is not there", "/v1/responses/resp_nothing"),
    messages("unknown model", model="nope"),
    messages("no messages", messages=[]),
    Case("detokenize text", "/detokenize", {"tokens": "x"}),
    Case("a decision that this model cannot make", "/v1/systemone", {"model": "tiny"}),
    Case("embeddings", "/v1/embeddings", {"model": "tiny", "input": TEXT}),
    Case("no such route", "/v1/nothing"),
    Case("wrong method", "/v1/completions"),
]  # fmt: skip
