"""Text: files of documents -> tokens in an indexed dataset, and the tokenizers that make them."""

from libai_data.text.preprocess import Preprocessed, preprocess
from libai_data.text.tokenizer import TextTokenizer, TokenizerFiles
from libai_data.text.tokenizer_training import train_tokenizer

__all__ = ["Preprocessed", "TextTokenizer", "TokenizerFiles", "preprocess", "train_tokenizer"]
