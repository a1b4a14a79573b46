"""Chats: the checkpoint's own template renders them, and what it cannot render is refused in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import processors

from rosellm.errors import CheckpointError, PromptError
from rosellm.models.chat import render_chat
from rosellm.models.tokenizer import load_tokenizer
from rosellm.rosetrainer.bpe import train_tokenizer
from tests.helpers import small_config
from tests.models.family_checks import refused

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


def test_each_folder_has_its_own_template(untemplated, tmp_path):
    for i, template in enumerate(("one", "two", "one")):
        (tmp_path / str(i)).mkdir()
        folder = templated(untemplated, tmp_path / str(i), template, in_config=True)
        assert render_chat(folder, MESSAGES) == template


def test_a_chat_is_rendered_by_the_checkpoints_template_with_the_ids_of_transformers(folder):
    from transformers import AutoTokenizer

    text = render_chat(folder, MESSAGES)
    assert text == render_chat(folder, MESSAGES, add_generation_prompt=False) + "<|assistant|>"
    assert text == RENDERED + "<|assistant|>"
    tokenizer = load_tokenizer(folder, small_config(vocab_size=400))
    ids = tokenizer.encode(text, special=False)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert ids == theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert ids.count(ids[0]) == 1 and tokenizer.encode(text) == [ids[0], *ids]


def test_a_folder_without_a_template_or_a_tokenizer_is_refused(untemplated, tmp_path):
    lacks = "has no tokenizer with a chat template"
    for folder, words in ((untemplated, "has no chat template; give a prompt as text"), (tmp_path, lacks)):
        refused(CheckpointError, (words,), render_chat, folder, MESSAGES)
    refused(CheckpointError, ("a dummy tokenizer has no chat template",), render_chat, None, MESSAGES)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hello", "messages are 'hello'; give a list of"),
        ([], "messages are []"),
        (["hello"], "message 0 is 'hello'"),
        ([MESSAGES[0], {"role": "user"}], "message 1 is {'role': 'user'}; give {\"role\": ..., \"content\""),
        ([{"role": "user", "content": [{"type": "text"}]}], "give text, or parts of text"),
        ([{"role": "user", "content": b"x" * 10_000}], "give text, or parts of text"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_other_messages_are_refused(folder, messages, words):
    refused(PromptError, (words,), render_chat, folder, messages)


FAILS, SYNTAX = "fails on the messages: ", "has a syntax error: "


@pytest.mark.parametrize(
    ("kind", "template", "words"),
    [
        (PromptError, TEMPLATE, FAILS + "no role tool"),
        (PromptError, "{{ raise_exception('one\ntwo') }}", FAILS + "one two"),
        (PromptError, "{{ 1 / 0 }}", FAILS + "division by zero"),
        (PromptError, "{{ ''.__class__.__mro__ }}", FAILS + "access to attribute '__class__'"),
        (CheckpointError, "{% for m in messages %}", SYNTAX + "Unexpected end of template"),
        (CheckpointError, "{{ messages | nothing }}", SYNTAX + "No filter named 'nothing'"),
        (CheckpointError, 5, "has no chat template"),
        (CheckpointError, [{"name": "a"}], "has no tokenizer with a chat template"),
    ],
    ids=str,
)
def test_a_template_that_fails_is_refused(untemplated, tmp_path, kind, template, words):
    folder = templated(untemplated, tmp_path, template, in_config=True)
    refused(kind, (words,), render_chat, folder, [{"role": "tool", "content": "x"}])
