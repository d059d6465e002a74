"""Conversations, chat templates in the forms of published ones, a tokenizer's folder, and what of a sample counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.text.corpora import byte_level_folder

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# With marks around what an assistant says, and its header in the loop.
MARKED = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>{%- endgeneration %}{% else %}{{ message.content }}<|im_end|>"
    "{% endif %}\n\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Llama 3: a token first, content trimmed, and tools.
HEADERS = (
    "{{ bos_token }}{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n\n{{ message.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
# As Mistral's: no header of the assistant, and no system message.
INSTRUCTIONS = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% elif message.role == 'assistant' %} {{ message.content }}<|im_end|>"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "marked": MARKED, "headers": HEADERS, "instructions": INSTRUCTIONS}


def tokenizer_folder(folder: Path, template: str = CHATML) -> Path:
    """A byte-level BPE with the special tokens of these templates."""
    config = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>", "pad_token": "<pad>", "chat_template": template}
    special = ["<|begin|>", "<|im_start|>", "<|im_end|>", "<pad>"]
    return byte_level_folder(folder, special, config, vocab_size=320)


def conversation(*contents: str, system: str = "") -> dict[str, Any]:
    """A conversation of a user and an assistant, who speak in turn."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [
        {"role": "assistant" if number % 2 else "user", "content": content} for number, content in enumerate(contents)
    ]
    return {"messages": messages}


def arrays(sample: Any) -> dict[str, np.ndarray]:
    return {name: value.tensor for name, value in sample.get_fields().items()}


def check_alike(dataset: Any) -> None:
    """Check that all samples of a dataset are equal."""
    first, *others = (arrays(dataset[index]) for index in range(len(dataset)))
    for other in others:
        np.testing.assert_equal(other, first)


def learned(sample: dict[str, np.ndarray], folder: Path, prefix: str = "") -> str:
    """The text of the labels that count."""
    backend = pytest.importorskip("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    labels = sample[prefix + "labels"][sample[prefix + "loss_mask"] > 0]
    return str(backend.decode(labels.tolist(), skip_special_tokens=False))
