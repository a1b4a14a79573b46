"""Chats: the checkpoint's own template renders them, and what it cannot render is refused in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import processors

from rosellm.errors import CheckpointError, PromptError
from rosellm.models.chat import render_chat
from rosellm.models.families.table import read_arch
from rosellm.models.tokenizer import load_dummy_tokenizer, load_tokenizer
from rosellm.rosetrainer.bpe import train_tokenizer
from tests.models.family_checks import sizes

TEMPLATE = """{{ bos_token }}{% for m in messages %}
{%- if m.role not in ('system', 'user', 'assistant') %}{{ raise_exception('no role ' + m.role) }}{% endif %}
{{- '<|' + m.role + '|>' + m.content + '</s>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hé, wörld?\n🌹"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "{{ again }}"},
]
RENDERED = "<s><|system|>Be brief.</s><|user|>Hé, wörld?\n🌹</s><|assistant|></s><|user|>{{ again }}</s>"
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
ARCH = read_arch(sizes("llama") | {"model_type": "llama", "vocab_size": 400})


@pytest.fixture(scope="module")
def untemplated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's tokenizer, without a template; <s> is added to every text."""
    folder = tmp_path_factory.mktemp("untemplated")
    raw = train_tokenizer(["hello world, a few words"] * 3, 300)._raw
    raw.add_special_tokens(["<s>", "</s>", "<|user|>"])
    raw.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", raw.token_to_id("<s>"))])
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    return folder


def templated(untemplated: Path, to: Path, template: object, in_config: bool) -> Path:
    folder = Path(shutil.copytree(untemplated, to / "chat"))
    if in_config:
        (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG | {"chat_template": template}))
    else:
        (folder / "chat_template.jinja").write_text(str(template))
    return folder


@pytest.fixture(params=[True, False], ids=["tokenizer_config.json", "chat_template.jinja"])
def folder(request: pytest.FixtureRequest, untemplated: Path, tmp_path: Path) -> Path:
    return templated(untemplated, tmp_path, TEMPLATE, request.param)


def test_a_chat_is_rendered_by_the_checkpoints_template(folder):
    assert render_chat(folder, MESSAGES) == RENDERED + "<|assistant|>"
    assert render_chat(folder, MESSAGES, add_generation_prompt=False) == RENDERED


def test_a_rendered_chat_has_the_ids_of_transformers_with_one_beginning(folder):
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(folder, ARCH)
    text = render_chat(tokenizer.folder, MESSAGES)
    ids = tokenizer.encode(text, special=False)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert ids == theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert ids.count(ids[0]) == 1 and tokenizer.encode(text) == [ids[0], *ids]


def test_each_folder_has_its_own_template(untemplated, tmp_path):
    for i, template in enumerate(("one", "two", "one")):
        (tmp_path / str(i)).mkdir()
        folder = templated(untemplated, tmp_path / str(i), template, in_config=True)
        assert render_chat(folder, MESSAGES) == template


def test_the_next_chat_does_not_read_the_checkpoint_again(folder, monkeypatch):
    first = render_chat(folder, MESSAGES)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: pytest.fail("read"))
    assert render_chat(folder, MESSAGES) == first


def refused(kind: type, words: str, *given: object) -> None:
    with pytest.raises(kind) as caught:
        render_chat(*given)
    message = str(caught.value)
    assert type(caught.value) is kind
    assert "\n" not in message and words in message and len(message) < 600, message


def test_a_checkpoint_without_a_template_is_refused(untemplated):
    refused(CheckpointError, "has no chat template; give a prompt as text", untemplated, MESSAGES)


def test_a_dummy_tokenizer_has_no_template():
    dummy = load_dummy_tokenizer(ARCH)
    refused(CheckpointError, "a dummy tokenizer has no chat template", dummy.folder, MESSAGES)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    refused(CheckpointError, "has no tokenizer with a chat template", tmp_path, MESSAGES)


def test_remote_code_is_not_run(folder):
    fields = {"tokenizer_class": "Trap", "auto_map": {"AutoTokenizer": ["trap.Trap", "trap.Trap"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    (folder / "trap.py").write_text(f"open({str(folder / 'sprung')!r}, 'w')\nclass Trap: ...\n")
    try:
        render_chat(folder, MESSAGES)
    except CheckpointError as error:
        assert "\n" not in str(error)
    assert not (folder / "sprung").exists()


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hello", "messages are 'hello'; give a list of"),
        ({"role": "user", "content": "x"}, "messages are {'content': 'x', 'role': 'user'}; give a list"),
        (None, "messages are None"),
        ([], "messages are []"),
        (("x",), "messages are ('x',)"),
        (["hello"], "message 0 is 'hello'"),
        ([MESSAGES[0], {"role": "user"}], "message 1 is {'role': 'user'}; give {\"role\": ..., \"content\""),
        ([{"content": "x"}], "message 0 is {'content': 'x'}"),
        ([{"role": "user", "content": None}], "message 0 is {'content': None, 'role': 'user'}"),
        ([{"role": "user", "content": [{"type": "text"}]}], "both of them text"),
        ([{"role": 5, "content": "x"}], "message 0 is {'content': 'x', 'role': 5}"),
        ([["role", "user"] * 1000], "message 0 is ['role'"),
        ([{"role": "user", "content": b"x" * 10_000}], "both of them text"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_other_messages_are_refused(folder, messages, words):
    refused(PromptError, words, folder, messages)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (TEMPLATE, "fails on the messages: no role tool"),
        ("{{ raise_exception('one\ntwo') }}", "fails on the messages: one two"),
        ("{{ messages.nothing.at.all }}", "fails on the messages: "),
        ("{{ 1 / 0 }}", "fails on the messages: division by zero"),
        ("{{ ''.__class__.__mro__ }}", "fails on the messages: access to attribute '__class__'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_template_that_fails_is_told(untemplated, tmp_path, template, words):
    folder = templated(untemplated, tmp_path, template, in_config=False)
    refused(PromptError, words, folder, [{"role": "tool", "content": "x"}])


@pytest.mark.parametrize("in_config", [True, False], ids=["tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ messages", "unexpected end of template"),
        ("{% unknown %}", "unknown tag 'unknown'"),
        ("{{ messages | nothing }}", "No filter named 'nothing'"),
    ],
)
def test_a_syntax_error_in_a_template_is_the_checkpoints_fault(
    untemplated, tmp_path, template, words, in_config
):
    folder = templated(untemplated, tmp_path, template, in_config)
    told = f"the chat template in {folder} has a syntax error: "
    refused(CheckpointError, told, folder, MESSAGES)
    refused(CheckpointError, words, folder, MESSAGES)


@pytest.mark.parametrize("template", [5, {}, ["x"], [{"name": "a"}], True], ids=str)
def test_a_template_of_another_kind_is_refused(untemplated, tmp_path, template):
    folder = templated(untemplated, tmp_path, template, in_config=True)
    with pytest.raises(CheckpointError) as caught:
        render_chat(folder, MESSAGES)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
