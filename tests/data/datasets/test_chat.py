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

from libai_data import CyclicSampler
from libai_data.data.datasets import BlendedDataset, ChatDataset, ConcatDataset, PackedDataset, PreferenceDataset
from libai_data.data.datasets.shard_lengths import shard_lengths_of
from libai_data.data.files.identity import identity_within
from libai_data.data.sources import JsonLinesSource
from libai_data.data.text.tokenizer import TextTokenizer
from libai_data.errors import ConfigError, FormatError
from tests.data.datasets.chats import CHATML, TEMPLATES, arrays, check_alike, conversation, learned
from tests.loader.streams import loading

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")


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


def test_what_is_no_dataset_of_conversations_is_refused(tokenizer: TextTokenizer) -> None:
    items = [conversation("a", "b")]
    with pytest.raises(ConfigError, match=r"dataset is a dict, a mapping of \['train'\]; pass one dataset"):
        ChatDataset({"train": items}, tokenizer, 25)
    with pytest.raises(ConfigError, match=r"dataset is a list_iterator, whose len\(\) raises"):
        ChatDataset(iter(items), tokenizer, 25)


def test_too_long_conversations_are_refused_or_cut_at_either_end(folder: Path, tokenizer: TextTokenizer) -> None:
    item = [conversation("a", "the quick brown fox", "b", "a lazy dog")]
    with pytest.raises(FormatError, match=r"conversation 0: it has \d+ tokens, but max_seq_length is 25"):
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
    with loading(packed, CyclicSampler(packed, 2, shuffle=True, seed=3)) as loader:
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


def test_conversations_keep_the_weights_and_the_files_of_what_they_are_read_from(
    tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    sources = []
    for name, rows in (("a", 40), ("b", 20)):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(conversation(name, name)) + "\n") * rows)
        sources.append(JsonLinesSource(str(tmp_path / f"{name}.jsonl")))
    chats = ChatDataset(BlendedDataset(sources, [3, 1]), tokenizer, 64, pad=False)
    for dataset in (chats, PackedDataset(chats, 64, cut=False)):
        order = CyclicSampler(dataset, 4, shuffle=True).order
        assert (order.locate(np.arange(40))[1] >= 40).sum() == 10
        assert shard_lengths_of(dataset).tolist() == [40, 20]
        assert identity_within(dataset)
    within = ChatDataset(ConcatDataset([BlendedDataset(sources, [3, 1])]), tokenizer, 64)
    with pytest.raises(ConfigError, match="a BlendedDataset is within a ConcatDataset"):
        CyclicSampler(within, 4)


def test_conversations_in_utf_16_are_told(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    text = (json.dumps(conversation("the fox", "over")) + "\n") * 2
    (tmp_path / "a.jsonl").write_bytes(text.encode("utf-16"))
    dataset = ChatDataset(str(tmp_path / "a.jsonl"), tokenizer, 64)
    for index in range(len(dataset)):
        with pytest.raises(FormatError, match="as UTF-16 does: convert the file"):
            dataset[index]


def test_a_dataset_is_the_same_after_it_was_pickled_and_its_fingerprint_tells_what_decides(
    tokenizer: TextTokenizer,
) -> None:
    items = [conversation("a", "b")]
    dataset = ChatDataset(items, tokenizer, 64)
    again = pickle.loads(pickle.dumps(dataset))
    check_alike([dataset[0], again[0]])
    assert again.fingerprint() == dataset.fingerprint()
    changes: list[dict[str, Any]] = [
        {"max_seq_length": 32},
        {"chat_template": TEMPLATES["headers"]},
        {"loss_roles": ["user"]},
    ]
    for change in changes:
        assert ChatDataset(items, tokenizer, **{"max_seq_length": 64, **change}).fingerprint() != dataset.fingerprint()


@pytest.mark.parametrize("name", ["input_ids", "labels", "loss_mask"])
def test_the_field_of_padding_cannot_replace_another_field(tokenizer: TextTokenizer, name: str) -> None:
    with pytest.raises(ConfigError, match=f"segments is '{name}', the name of another field"):
        ChatDataset([conversation("a", "b")], tokenizer, 64, segments=name)
