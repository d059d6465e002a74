"""Conversations: loss on what an assistant says, and on nothing else, in every form of template."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libai_data import CyclicSampler, DataLoader
from libai_data.data.datasets import ChatDataset, PackedDataset, PreferenceDataset
from libai_data.data.text.tokenizer import TextTokenizer, TokenizerFiles
from libai_data.errors import ConfigError, FormatError
from tests.data.datasets.chats import CHATML, TEMPLATES, conversation, tokenizer_folder

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("chat") / "tokenizer")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TextTokenizer:
    return TokenizerFiles(str(folder)).load()


def arrays(sample: Any) -> dict[str, np.ndarray]:
    return {name: value.tensor for name, value in sample.get_fields().items()}


def learned(sample: dict[str, np.ndarray], folder: Path, prefix: str = "") -> str:
    """The text of the labels that count."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    labels = sample[prefix + "labels"][sample[prefix + "loss_mask"] > 0]
    return str(backend.decode(labels.tolist(), skip_special_tokens=False))


@pytest.mark.parametrize("name", TEMPLATES)
def test_loss_is_on_the_assistants_words_and_the_token_that_ends_them(
    folder: Path, tokenizer: TextTokenizer, name: str
) -> None:
    spoken = ["What is a fox?", "An animal.\nIt is red.", "And  a dog?", "Another one: 中文, naïve "]
    dataset = ChatDataset([conversation(*spoken)], tokenizer, 512, chat_template=TEMPLATES[name])
    sample = arrays(dataset[0])
    space = " " * (name == "instructions")
    last = spoken[3].strip() if name == "headers" else spoken[3]
    assert learned(sample, folder) == f"{space}{spoken[1]}<|im_end|>{space}{last}<|im_end|>"
    # Each label is the token that comes next, and the whole text is there.
    count = int((sample["input_ids"] != tokenizer.pad_token_id).sum())
    assert (sample["input_ids"][1:count] == sample["labels"][: count - 1]).all()
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = backend.decode([*sample["input_ids"][:count], sample["labels"][count - 1]], skip_special_tokens=False)
    assert text == dataset._template.render(conversation(*spoken)["messages"])
    assert not sample["loss_mask"][count:].any()
    assert sample["segment_ids"].tolist() == [1] * count + [0] * (512 - count)
    assert all(len(array) == 512 for array in sample.values())


def test_the_field_of_padding_may_have_another_name_or_none(tokenizer: TextTokenizer) -> None:
    chats = [conversation("a", "b")]
    for options, names in (
        ({"segments": None}, set()),
        ({"segments": "real"}, {"real"}),
        ({"pad": False}, set()),
    ):
        dataset = ChatDataset(chats, tokenizer, 64, **options)
        assert set(dataset[0].get_fields()) == {"input_ids", "labels", "loss_mask"} | names


WORDS = st.text("ab \n.中é<|", min_size=1, max_size=20)


@given(st.lists(WORDS, min_size=2, max_size=7), st.sampled_from(sorted(TEMPLATES)))
def test_what_is_asked_never_carries_loss(folder: Path, tokenizer: TextTokenizer, spoken: list[str], name: str) -> None:
    # An answer of white space alone may be trimmed to nothing but its end, which carries loss.
    dataset = ChatDataset([conversation(*spoken)], tokenizer, 2048, chat_template=TEMPLATES[name])
    found = learned(arrays(dataset[0]), folder)
    trimmed = [text.strip() if name == "headers" else text for text in spoken[1::2]]
    if name == "instructions":
        trimmed = [f" {text}" for text in trimmed]
    assert found == "".join(f"{text}<|im_end|>" for text in trimmed)


def test_roles_and_messages_choose_what_carries_loss(folder: Path, tokenizer: TextTokenizer) -> None:
    item = conversation("one", "two", "three", "four", system="be kind")
    item["messages"][2]["weight"] = 0
    item["messages"][3]["weight"] = 1
    assert learned(arrays(ChatDataset([item], tokenizer, 256)[0]), folder) == (
        "<|im_start|>user\nthree<|im_end|>four<|im_end|>"
    )
    dataset = ChatDataset([conversation("one", "two", system="be kind")], tokenizer, 256, loss_roles=["system"])
    # Nothing predicts the first token of all.
    assert learned(arrays(dataset[0]), folder) == "system\nbe kind<|im_end|>"


# As Qwen 2.5: a system message of its own, and no way to ask before the first message.
OWN_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
    + TEMPLATES["chatml"]
)


@pytest.mark.parametrize("template", [*TEMPLATES.values(), OWN_SYSTEM])
def test_what_is_before_the_words_of_an_assistant_who_begins_carries_no_loss(
    folder: Path, tokenizer: TextTokenizer, template: str
) -> None:
    messages = [{"role": "assistant", "content": "one two"}, *conversation("three", "four")["messages"]]
    sample = arrays(ChatDataset([{"messages": messages}], tokenizer, 256, chat_template=template)[0])
    assert learned(sample, folder).replace(" four", "four").lstrip() == "one two<|im_end|>four<|im_end|>"


NO_PROMPT = CHATML[: CHATML.index("{% if")]
AFTER_USER = CHATML.replace("if add", "if messages[-1].role == 'user' and add")
THINKS = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")


@pytest.mark.parametrize("template", [NO_PROMPT, AFTER_USER, THINKS, OWN_SYSTEM])
@pytest.mark.parametrize("words", ["a", "You", "", "assistant"])
def test_the_header_of_an_assistant_carries_no_loss_where_the_template_does_not_ask_as_it_writes(
    folder: Path, tokenizer: TextTokenizer, template: str, words: str
) -> None:
    before = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c", "weight": 0}]
    for first in ([], before[:1], before):
        messages = [*first, {"role": "assistant", "content": words}]
        sample = arrays(ChatDataset([{"messages": messages}], tokenizer, 256, chat_template=template)[0])
        assert learned(sample, folder).strip() == f"{words}<|im_end|>"


def test_alpacas_fields_and_tools_and_files_of_json_lines(
    folder: Path, tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    tools = [{"name": "wetter", "description": "größe <b>"}]
    rows = [
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Say yes.", "input": "", "output": "yes"},
        {**conversation("one", "two"), "tools": tools},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    dataset = ChatDataset(str(path), tokenizer, 256, chat_template=TEMPLATES["headers"])
    assert [learned(arrays(dataset[n]), folder) for n in range(3)] == ["3<|im_end|>", "yes<|im_end|>", "two<|im_end|>"]
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    first, last = (backend.decode(arrays(dataset[n])["input_ids"].tolist()) for n in (0, 2))
    assert "Add.\n\n1 2" in first
    assert json.dumps(tools, ensure_ascii=False) in last


def test_alpacas_history_and_a_system_text_are_what_messages_of_the_same_words_are(tokenizer: TextTokenizer) -> None:
    written = conversation("a", "b", "c", "d", "add\n\n1", "e", system="be kind")
    alpaca = {"instruction": "add", "input": "1", "output": "e", "history": [["a", "b"], ("c", "d")]}
    same = [
        written,
        {**written, "system": "be kind"},
        {**conversation("a", "b", "c", "d", "add\n\n1", "e"), "system": "be kind"},
        {**alpaca, "system": "be kind"},
        {**alpaca, "system": "be kind", "history": np.array(alpaca["history"], object)},
    ]
    none = [conversation("add\n\n1", "e"), {**alpaca, "history": []}, {**alpaca, "history": None, "system": ""}]
    for items in (same, none):
        dataset = ChatDataset(items, tokenizer, 256)
        samples = [arrays(dataset[index]) for index in range(len(items))]
        assert all((sample[name] == samples[0][name]).all() for sample in samples for name in sample)
    tools = [{"name": "f"}]
    with_tools = [{**conversation("a", "b"), "tools": tools}, {"instruction": "a", "output": "b", "tools": tools}]
    dataset = ChatDataset(with_tools, tokenizer, 256, chat_template=TEMPLATES["headers"])
    one, other = dataset[0], dataset[1]
    assert (one.input_ids.tensor == other.input_ids.tensor).all()


def test_a_system_text_is_before_both_answers_of_a_pair(tokenizer: TextTokenizer) -> None:
    texts = {"prompt": "a", "chosen": "b", "rejected": "c"}
    whole = {name: conversation("a", texts[name], system="s")["messages"] for name in ("chosen", "rejected")}
    dataset = PreferenceDataset([whole, {**whole, "system": "s"}, {**texts, "system": "s"}], tokenizer, 64)
    first, *others = (arrays(dataset[number]) for number in range(3))
    assert all((other[name] == first[name]).all() for other in others for name in first)


def test_too_long_conversations_are_refused_or_cut_at_either_end(folder: Path, tokenizer: TextTokenizer) -> None:
    item = [conversation("a", "the quick brown fox", "b", "a lazy dog")]
    with pytest.raises(FormatError, match=r"conversation 0: it has \d+ tokens, and max_seq_length is 25"):
        ChatDataset(item, tokenizer, 25)[0]
    whole = learned(arrays(ChatDataset(item, tokenizer, 256)[0]), folder)
    start = learned(arrays(ChatDataset(item, tokenizer, 25, too_long="cut_end")[0]), folder)
    end = learned(arrays(ChatDataset(item, tokenizer, 25, too_long="cut_start")[0]), folder)
    assert whole.startswith(start) and whole.endswith(end) and start and end and start != end != whole
    with pytest.raises(FormatError, match=r"of which 2 are kept, none carries loss"):
        ChatDataset(item, tokenizer, 2, too_long="cut_end")[0]


def test_packed_conversations_have_segments_and_positions_of_their_own(folder: Path, tokenizer: TextTokenizer) -> None:
    items = [conversation(f"say {number}", "the dog " * (1 + number % 5)) for number in range(40)]
    chats = ChatDataset(items, tokenizer, 128, pad=False)
    lengths = [len(arrays(chats[number])["labels"]) for number in range(40)]
    packed = PackedDataset(chats, 128, cut=False)
    loader = DataLoader(packed, CyclicSampler(packed, 2, shuffle=True, seed=3))
    batch = next(iter(loader))
    segments, positions = batch.segment_ids.tensor.numpy(), batch.position_ids.tensor.numpy()
    assert (segments > 0).mean() > 0.6
    for row in range(2):
        for segment in range(1, segments[row].max() + 1):
            inside = segments[row] == segment
            assert positions[row][inside].tolist() == list(range(inside.sum()))
            assert inside.sum() in lengths
    loss = batch.loss_mask.tensor.numpy()
    assert not loss[segments == 0].any() and loss.any()
    loader.close()


def test_pairs_carry_loss_where_they_differ(folder: Path, tokenizer: TextTokenizer) -> None:
    both = conversation("one", "two", "three")["messages"]
    items = [
        {
            "chosen": [*both, {"role": "assistant", "content": "good"}],
            "rejected": [*both, {"role": "assistant", "content": "bad one"}],
        },
        {"prompt": "three", "chosen": "good", "rejected": "bad one"},
        {"prompt": both, "chosen": "good", "rejected": "bad one"},
    ]
    dataset = PreferenceDataset(items, tokenizer, 128)
    for number in range(3):
        sample = arrays(dataset[number])
        assert learned(sample, folder, "chosen_") == "good<|im_end|>"
        assert learned(sample, folder, "rejected_") == "bad one<|im_end|>"
    layouts = {name: value.placement_idx for name, value in dataset[0].get_fields().items()}
    assert layouts == {
        f"{kind}_{name}": stage
        for kind in ("chosen", "rejected")
        for name, stage in (("input_ids", 0), ("labels", -1), ("loss_mask", -1), ("segment_ids", 0))
    }


def test_a_prompt_that_both_answers_repeat_is_there_once(folder: Path, tokenizer: TextTokenizer) -> None:
    asked, answers = {"role": "user", "content": "p"}, {"chosen": "x", "rejected": "y"}
    repeated = {name: [asked, {"role": "assistant", "content": words}] for name, words in answers.items()}
    pairs = PreferenceDataset([{"prompt": "p", **answers}, {"prompt": "p", **repeated}], tokenizer, 64)
    again = arrays(pairs[1])
    assert all((again[name] == array).all() for name, array in arrays(pairs[0]).items())


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "'chosen' and 'rejected' are the same"),
        ({"question": "a", "chosen": "b", "rejected": "c"}, "'rejected'\\]; a pair of texts needs the text"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "history": [["d", "e"]]}, "it has a 'history', which pairs"),
        ({"prompt": "a", "chosen": "b", "rejected": []}, "its messages are \\[\\]"),
        (
            {"prompt": "a", "chosen": None, "rejected": "b"},
            r"from number 1 on, none carries loss: their roles are \[\]",
        ),
    ],
)
def test_what_is_no_pair_is_refused(tokenizer: TextTokenizer, item: dict[str, Any], words: str) -> None:
    with pytest.raises(FormatError, match=words):
        PreferenceDataset([item], tokenizer, 64, chat_template=TEMPLATES["instructions"])[0]


def said(message: dict[str, Any]) -> dict[str, Any]:
    """A conversation with a message of the assistant that no template can write."""
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", **message}]}


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"text": "a"}, r"has the fields \['text'\]; a conversation has 'messages'"),
        ({"instruction": "a", "output": None}, "its 'output' is None"),
        ({"instruction": "a", "input": 3, "output": "b"}, "its 'input' is 3; it must be a text"),
        ({"instruction": "a", "output": "b", "history": [["a", "b", "c"]]}, r"'history' has \['a', 'b', 'c'\]"),
        ({"instruction": "a", "output": "b", "history": "a"}, "'history' has 'a'; it must be a list of pairs"),
        ({**conversation("a", "b"), "system": 3}, "its 'system' is 3; it must be a text"),
        ({**conversation("a", "b", system="s"), "system": "t"}, "its 'system' is not the system message"),
        ({"messages": []}, "must be a list of one or more"),
        ({"messages": ["hello"]}, "message 0 is 'hello'"),
        ({"messages": [{"role": "user", "content": "a"}]}, r"none carries loss: their roles are \['user'\]"),
        (said({"content": "a", "weight": 2}), "message 1 has the weight 2; it must be 0 or 1"),
        (said({"content": "a", "weight": np.array([0, 1])}), r"message 1 has the weight .*\[0, 1\]"),
        (conversation("a", "b", system="s"), "only user and assistant"),
        (said({"text": "b"}), r"message 1 has the fields \['role', 'text'\]; it must have a 'content'"),
        (said({"tool_calls": []}), "message 1 has the fields .* or 'tool_calls'"),
        ({"messages": [{"role": "user"}, *said({"content": "b"})["messages"]]}, "message 0 has the fields"),
        (said({"content": 3}), "message 1 has the content 3; it must be a text"),
        (said({"content": [{"type": "image", "url": "a"}]}), "message 1 has the content .*image"),
        (said({"content": "\ud800"}), "no Unicode text"),
        (said({"content": None, "tool_calls": [{"name": "f"}]}), "has tool_calls, but the chat template"),
        ({**conversation("a", "b"), "tools": "f"}, "tools are 'f'"),
        ({**conversation("a", "b"), "tools": [{"name": "f"}]}, "there are tools, but"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_index(
    tokenizer: TextTokenizer, item: dict[str, Any], words: str
) -> None:
    dataset = ChatDataset([conversation("a", "b"), item], tokenizer, 64, chat_template=TEMPLATES["instructions"])
    with pytest.raises(FormatError, match=words) as told:
        dataset[1]
    assert "conversation 1: " in str(told.value)
    assert ChatDataset([{**conversation("a", "b"), "tools": []}], tokenizer, 64)[0] is not None


def test_messages_may_be_parts_of_text_nothing_and_arrays_of_a_table(folder: Path, tokenizer: TextTokenizer) -> None:
    messages = conversation("one", "two words", system="")["messages"]
    parts = [{"type": "text", "text": "two "}, {"type": "text", "text": "words"}]
    same = [
        messages,
        tuple(messages),
        np.array(messages, object),
        [{"role": "user", "content": ["o", "ne"]}, {"role": "assistant", "content": np.array(parts, object)}],
    ]
    samples = [arrays(ChatDataset([{"messages": each}], tokenizer, 64)[0]) for each in same]
    assert all((sample[name] == samples[0][name]).all() for sample in samples for name in sample)
    # No content is nothing, and not the word None.
    silent = [*messages, {"role": "user", "content": None}, {"role": "assistant", "content": None}]
    assert (
        learned(arrays(ChatDataset([{"messages": silent}], tokenizer, 64)[0]), folder)
        == "two words<|im_end|><|im_end|>"
    )
    # Nor has a message that calls tools to say anything.
    template = CHATML.replace("{{ message['content'] }}", "{{ message['content'] }}{{ message.tool_calls }}")
    calling = [messages[0], {"role": "assistant", "tool_calls": [{"name": "f"}]}]
    dataset = ChatDataset([{"messages": calling}], tokenizer, 64, chat_template=template)
    assert learned(arrays(dataset[0]), folder) == "[{'name': 'f'}]<|im_end|>"


def test_a_template_that_changes_what_is_before_is_refused(tokenizer: TextTokenizer) -> None:
    # As templates of models that think: earlier answers lose a part.
    thinking = CHATML.replace(
        "{{ message['content'] }}",
        "{% if loop.last and message.role == 'assistant' %}<think>{% endif %}{{ message['content'] }}",
    )
    dataset = ChatDataset([conversation("a", "b", "c", "d")], tokenizer, 128, chat_template=thinking)
    with pytest.raises(FormatError, match="otherwise when others follow"):
        dataset[0]
    assert ChatDataset([conversation("a", "b")], tokenizer, 128, chat_template=thinking)[0] is not None


@pytest.mark.parametrize("sign", ["", "-", "+"])
def test_marks_of_what_an_assistant_says_may_have_either_sign(tokenizer: TextTokenizer, sign: str) -> None:
    template = "{% for m in messages %}{{ m.role }}: {%* generation %}{{ m.content }}{%* endgeneration %};{% endfor %}"
    for marks in (
        template.replace("*", sign),
        template.replace("{%*", "{%").replace("generation %", f"generation {sign}%"),
    ):
        dataset = ChatDataset([conversation("the fox", "over")], tokenizer, 64, chat_template=marks)
        assert dataset[0].loss_mask.tensor.any()


def test_of_a_folder_conversations_are_read_and_what_is_skipped_is_told(
    tokenizer: TextTokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a.jsonl", "sub/B.NDJSON"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(conversation("the fox", "over")) + "\n")
    for name in ("README.md", "LICENSE"):
        (tmp_path / name).write_text("# A dataset\n")
    with caplog.at_level("WARNING"):
        dataset = ChatDataset(str(tmp_path), tokenizer, 64, chat_template=CHATML)
    assert len(dataset) == 2 and all(dataset[number] is not None for number in range(2))
    assert "2 of 4 files" in caplog.text
    (tmp_path / "c.jsonl.gz").write_bytes(b"")
    with pytest.raises(ConfigError, match="is compressed"):
        ChatDataset(str(tmp_path), tokenizer, 64, chat_template=CHATML)


def test_conversations_in_utf_16_are_told(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    text = (json.dumps(conversation("the fox", "over")) + "\n") * 2
    (tmp_path / "a.jsonl").write_bytes(text.encode("utf-16"))
    dataset = ChatDataset(str(tmp_path / "a.jsonl"), tokenizer, 64)
    for index in range(len(dataset)):
        with pytest.raises(FormatError, match="as UTF-16 does: convert the file"):
            dataset[index]


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
    with pytest.raises(ConfigError, match="jinja is no UTF-8"):
        TokenizerFiles(str(path)).load()
    (path / "chat_template.jinja").write_text(TEMPLATES["headers"])
    items = [conversation("a", "b")]
    bare = TokenizerFiles(str(path / "tokenizer.json")).load()
    with pytest.raises(ConfigError, match="there is no chat template"):
        ChatDataset(items, bare, 64)
    with pytest.raises(ConfigError, match="is no Jinja"):
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


def test_a_dataset_is_the_same_after_it_was_pickled_and_its_fingerprint_tells_what_decides(
    tokenizer: TextTokenizer,
) -> None:
    items = [conversation("a", "b")]
    dataset = ChatDataset(items, tokenizer, 64)
    again = pickle.loads(pickle.dumps(dataset))
    assert all((ours == theirs).all() for ours, theirs in zip(arrays(dataset[0]).values(), arrays(again[0]).values()))
    assert again.fingerprint() == dataset.fingerprint()
    changes: list[dict[str, Any]] = [
        {"max_seq_length": 32},
        {"chat_template": TEMPLATES["headers"]},
        {"loss_roles": ["user"]},
    ]
    for change in changes:
        assert ChatDataset(items, tokenizer, **{"max_seq_length": 64, **change}).fingerprint() != dataset.fingerprint()
