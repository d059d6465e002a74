"""Chat templates: what they mark, change and leave out."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from libai_data.data.datasets import ChatDataset
from libai_data.data.text.tokenizer import TextTokenizer, TokenizerFiles
from libai_data.errors import ConfigError, FormatError
from tests.data.datasets.chats import CHATML, TEMPLATES, arrays, conversation, learned, tokenizer_folder
from tests.data.text.corpora import byte_level_folder

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")


# As templates of models that think: earlier answers lose a part.
THINKING = CHATML.replace(
    "{{ message['content'] }}",
    "{% if loop.last and message.role == 'assistant' %}<think>{% endif %}{{ message['content'] }}",
)


def test_a_template_that_changes_what_is_before_is_refused_unless_one_answer_counts(
    folder: Path, tokenizer: TextTokenizer
) -> None:
    several = conversation("a", "b", "c", "d")
    dataset = ChatDataset([several], tokenizer, 128, chat_template=THINKING)
    with pytest.raises(FormatError, match=r'in another form when others follow.*{% generation %}.*"weight": 0'):
        dataset[0]
    several["messages"][1]["weight"] = 0
    for item, found in ((conversation("a", "b"), "<think>b"), (several, "<think>d")):
        dataset = ChatDataset([item], tokenizer, 128, chat_template=THINKING)
        assert learned(arrays(dataset[0]), folder) == f"{found}<|im_end|>"


def test_a_token_at_the_end_of_all_messages_alone_is_of_the_last(folder: Path, tokenizer: TextTokenizer) -> None:
    # As Phi 3's, with another token at the end of each message.
    template = CHATML.replace("<|im_end|>", "<|begin|>").replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
    dataset = ChatDataset([conversation("a", "b", "c", "d")], tokenizer, 64, chat_template=template)
    assert learned(arrays(dataset[0]), folder) == "b<|begin|>d<|begin|>\n<|im_end|>"


def test_a_token_that_the_folder_sets_to_null_is_not_written(tmp_path: Path) -> None:
    # As Qwen's folders, whose vocabulary has <|endoftext|>.
    config = {"bos_token": None, "eos_token": "<|im_end|>"}
    folder = byte_level_folder(tmp_path, ["<|endoftext|>", "<|im_end|>"], config)
    tokenizer = TokenizerFiles(str(folder)).load()
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}{{ m.content }}{{ eos_token }}{% endfor %}"
    sample = ChatDataset([conversation("a", "b")], tokenizer, 64, chat_template=template)[0]
    assert tokenizer.id_of("<|endoftext|>") not in sample.input_ids.tensor
    assert tokenizer.bos_token_id == tokenizer.id_of("<|endoftext|>")


@pytest.mark.parametrize("character", ["\ue000", "\ue001"])
def test_a_message_may_begin_with_any_character(folder: Path, tokenizer: TextTokenizer, character: str) -> None:
    asked = conversation("a", "b", system=character)
    assert ChatDataset([asked], tokenizer, 128, chat_template=TEMPLATES["headers"])[0] is not None
    item = conversation("a", character + "b", "c", character)
    sample = arrays(ChatDataset([item], tokenizer, 128, chat_template=TEMPLATES["instructions"])[0])
    assert learned(sample, folder).replace(" ", "") == f"{character}b<|im_end|>{character}<|im_end|>"


IN_LOOP = THINKING.replace("{% if loop", "{% generation %}{% if loop")
IN_LOOP = IN_LOOP.replace("<|im_end|>", "<|im_end|>{% endgeneration %}", 1)
# Of the assistant's only, in a macro, and the token that ends all behind the loop, as Phi 3's.
END_OF_ALL = (
    "{% macro said(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}{% for m in messages %}"
    "<|im_start|>{% if m.role == 'assistant' %}{{ said(m) }}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% generation %}<|im_end|>{% endgeneration %}"
)
UNNAMED = (
    "{% for text in messages | map(attribute='content') %}<|im_start|>{% if loop.index0 % 2 %}{% generation %}"
    "{{ text }}{% endgeneration %}{% else %}{{ text }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "both", "first", "last"),
    [
        (IN_LOOP, "b<|im_end|><think>d<|im_end|>", "b<|im_end|>", "<think>d<|im_end|>"),
        (END_OF_ALL, "bd<|im_end|>", "b", "d<|im_end|>"),
        (UNNAMED, "bd", "b", "d"),
    ],
)
def test_marks_of_a_template_decide_what_carries_loss_of_the_messages_that_may(
    folder: Path, tokenizer: TextTokenizer, template: str, both: str, first: str, last: str
) -> None:
    for weights, expected in (((1, 1), both), ((1, 0), first), ((0, 1), last)):
        item = conversation("a", "b", "c", "d")
        for message, weight in zip(item["messages"][1::2], weights):
            message["weight"] = weight
        dataset = pickle.loads(pickle.dumps(ChatDataset([item], tokenizer, 128, chat_template=template)))
        assert learned(arrays(dataset[0]), folder) == expected


def test_marks_that_belong_to_no_message_are_refused(tokenizer: TextTokenizer) -> None:
    twice = UNNAMED + "{% generation %}c{% endgeneration %}"
    with pytest.raises(FormatError, match=r"marks 3 parts by 'generation', but not in a loop .* 2 are the assistant's"):
        ChatDataset([conversation("a", "b", "c", "d")], tokenizer, 64, chat_template=twice)[0]


def test_spaces_count_where_they_are_whatever_the_tokenizer_makes_of_their_places(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path)
    path = folder / "tokenizer.json"
    # As Pythia's and RoBERTa's.
    trims = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": trims}))
    said = "{% generation %}{{ m.content }}{% endgeneration %}"
    template = f"{{% for m in messages %}}{{{{ m.role }}}}: {said}<|im_end|>{{% endfor %}}"
    dataset = ChatDataset([conversation("a", "\nb ")], TokenizerFiles(str(folder)).load(), 64, chat_template=template)
    assert learned(arrays(dataset[0]), folder) == "\nb "


def test_a_token_with_the_end_of_a_prompt_and_the_first_word_of_an_answer_counts(
    folder: Path, tokenizer: TextTokenizer
) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    assert [len(ids) for ids in tokenizer.encode_batch([" the", "the"])] == [1, 2]
    dataset = ChatDataset([conversation("a", "the fox", "b", "the")], tokenizer, 64, chat_template=template)
    assert learned(arrays(dataset[0]), folder) == " the fox<|im_end|> the<|im_end|>"


@pytest.mark.parametrize(("end", "counts"), [("\n", "\n"), ("\n\n", "\n\n"), (" ", ""), ("<|im_end|>\n", "<|im_end|>")])
def test_the_end_of_a_line_counts_if_nothing_else_ends_a_message(
    folder: Path, tokenizer: TextTokenizer, end: str, counts: str
) -> None:
    template = f"{{% for m in messages %}}{{{{ m.role }}}}:{{{{ m.content }}}}{end}{{% endfor %}}"
    dataset = ChatDataset([conversation("a", "the fox", "b", "over")], tokenizer, 64, chat_template=template)
    assert learned(arrays(dataset[0]), folder) == f"the fox{counts}over{counts}"


DROPS = CHATML.replace("<|im_start|>", "{% if message.role in ['user', 'assistant'] %}<|im_start|>", 1)
DROPS = DROPS.replace("\n{% endfor", "\n{% endif %}{% endfor", 1)


@pytest.mark.parametrize("template", [DROPS, "You are kind.\n" + DROPS])
def test_a_template_that_writes_no_system_message_refuses_one(tokenizer: TextTokenizer, template: str) -> None:
    item = conversation("a", "b")
    assert ChatDataset([item], tokenizer, 64, chat_template=template)[0] is not None
    for asked in ({**item, "system": "You are kind."}, conversation("a", "b", system="You are kind.")):
        with pytest.raises(FormatError, match="message 0 has the role 'system' and says 'You are kind"):
            ChatDataset([asked], tokenizer, 64, chat_template=template)[0]


@pytest.mark.parametrize("sign", ["", "-", "+"])
def test_marks_of_what_an_assistant_says_may_have_either_sign(tokenizer: TextTokenizer, sign: str) -> None:
    template = "{% for m in messages %}{{ m.role }}: {%* generation %}{{ m.content }}{%* endgeneration %};{% endfor %}"
    for marks in (
        template.replace("*", sign),
        template.replace("{%*", "{%").replace("generation %", f"generation {sign}%"),
    ):
        dataset = ChatDataset([conversation("the fox", "over")], tokenizer, 64, chat_template=marks)
        assert dataset[0].loss_mask.tensor.any()


def test_templates_come_from_the_folder_and_what_is_missing_is_told(tmp_path: Path, folder: Path) -> None:
    path = tokenizer_folder(tmp_path / "other")
    config = json.loads((path / "tokenizer_config.json").read_text())
    two = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": two}))
    assert TokenizerFiles(str(path)).load().chat_template == CHATML
    (path / "chat_template.jinja").write_text(TEMPLATES["headers"])
    assert TokenizerFiles(str(path)).load().chat_template == TEMPLATES["headers"]
    (path / "chat_template.jinja").write_bytes(b"\xef\xbb\xbf" + CHATML.encode())
    assert TokenizerFiles(str(path)).load().chat_template == CHATML
    (path / "chat_template.jinja").write_bytes(CHATML.encode("utf-16"))
    with pytest.raises(ConfigError, match="jinja is not UTF-8"):
        TokenizerFiles(str(path)).load()
    (path / "chat_template.jinja").write_text(TEMPLATES["headers"])
    items = [conversation("a", "b")]
    bare = TokenizerFiles(str(path / "tokenizer.json")).load()
    with pytest.raises(ConfigError, match="there is no chat template"):
        ChatDataset(items, bare, 64)
    with pytest.raises(ConfigError, match="is not valid Jinja"):
        ChatDataset(items, bare, 64, chat_template="{% for %}")
    with pytest.raises(ConfigError, match="pass the result of load_tokenizer"):
        ChatDataset(items, object(), 64, chat_template=CHATML)
    escaping = TokenizerFiles(str(path), escape_special_tokens=True).load()
    with pytest.raises(ConfigError, match="escape_special_tokens"):
        ChatDataset(items, escaping, 64)[0]


@pytest.mark.parametrize("found", [{"default": CHATML}, [{"name": "default", "template": {"text": CHATML}}], True])
def test_a_template_that_is_no_text_is_refused_as_the_tokenizer_is_loaded(tmp_path: Path, found: Any) -> None:
    path = tokenizer_folder(tmp_path / "tokenizer")
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": found}))
    with pytest.raises(ConfigError, match=r"tokenizer: the chat_template is .*; it must be a text in Jinja"):
        TokenizerFiles(str(path)).load()
