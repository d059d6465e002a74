"""Text: files of documents -> tokens in an indexed dataset, and the tokenizers that make them."""

from libai_data.data.text.preprocessing import Preprocessed, preprocess
from libai_data.data.text.shards import Task
from libai_data.data.text.tokenizer import TextTokenizer, TokenizerFiles, load_tokenizer
from libai_data.data.text.tokenizer_training import Training, train_tokenizer

__all__ = [
    "Preprocessed",
    "Task",
    "TextTokenizer",
    "TokenizerFiles",
    "Training",
    "load_tokenizer",
    "preprocess",
    "train_tokenizer",
]
