"""Samples for GPT: parts of fixed length of a stream of documents, or packs of whole documents."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from libai_data.data.datasets import gpt_index
from libai_data.data.datasets.combine import check_index
from libai_data.data.datasets.document_parts import report_tokens
from libai_data.data.datasets.gpt_batch import BatchFiller, SampleForm
from libai_data.data.sources.indexed import IndexedSource
from libai_data.errors import ConfigError
from libai_data.errors.argument_rules import check_types, whole, with_python_numbers
from libai_data.structures import DistTensorData, Instance


class GPTDataset:
    """Token sequences and their next tokens, from `.bin/.idx` files.

    The documents make a stream, one after the other and epoch after epoch. Sample i begins at token
    `i * max_seq_length` of the stream. Its last label is the first token of sample i + 1, so each token is predicted
    once.

    Fields of a sample of length L = `max_seq_length`: `input_ids` and `labels`, int64 [L]; and with the options below

    - `position_ids`, int64 [L];
    - `attention_mask`, bool [L, L], True where a token (row) sees another (column);
    - `loss_mask`, float32 [L], 0 where a label does not count;
    - `cu_seqlens`, int32 [L + 1], also with `packing`: where the documents of a sample, or their parts in it, begin and
      end. The last end is repeated up to length L + 1, so that all samples have the same shape;
    - `max_seqlen`, int32 [], with `cu_seqlens`: tokens of the longest of these documents.

    `labels` and `loss_mask` are for the last pipeline stage, all others for the first. If `layouts` splits a field
    along the sequence, each tensor-parallel rank reads only its own tokens of the field.

    Args:
        data_prefix: path of the two files without their endings, or their `IndexedSource`.
        max_seq_length: tokens of a sample.
        num_epochs: how often the stream repeats the corpus, without a gap.
        shuffle_documents: use a random order of documents in each epoch; by default the order of the file.
        seed: decides the random orders.
        reset_position_ids: return `position_ids`, which restart at 0 with each document.
        reset_attention_mask: return `attention_mask`; a token attends to earlier tokens of its own document only.
        eod_mask_loss: return `loss_mask`, which is 0 for the label after the last token of a document; with `packing`,
            no sample has such a label.
        packing: pack whole documents into samples by best fit, instead of cutting the stream. Samples have
            `position_ids`, `loss_mask` and `cu_seqlens`. Documents longer than a sample are cut; documents of a single
            token are left out.
        pad_last: keep an incomplete last sample, padded, and return `loss_mask`; by default this sample is left out.
        pad_id: the token of the padding, also in `labels`.
        cache_dir: folder for the indices; by default `<data_prefix>.cache`; see `record_index.index_folder`.
        cu_seqlens: return `cu_seqlens` and `max_seqlen`: the information of `attention_mask` in L + 2 numbers instead
            of L * L.

    Raises:
        ConfigError: A file is missing, an argument is out of range, or there are fewer tokens than one sample needs.
        FormatError: A file is broken.
    """

    @with_python_numbers
    def __init__(
        self,
        data_prefix: str | Path | IndexedSource,
        max_seq_length: int,
        num_epochs: int = 1,
        shuffle_documents: bool = False,
        seed: int = 1234,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        eod_mask_loss: bool = False,
        packing: bool = False,
        pad_last: bool = False,
        pad_id: int = 0,
        cache_dir: str | Path | None = None,
        cu_seqlens: bool = False,
    ) -> None:
        check_types(GPTDataset, locals(), {"max_seq_length": whole(1, 1 << 22), "num_epochs": whole(1, 1 << 20)})
        if (packing or cu_seqlens) and reset_attention_mask:
            raise ConfigError(
                f"{'packing' if packing else 'cu_seqlens'} and reset_attention_mask exclude each other: cu_seqlens "
                "already restricts what tokens see"
            )
        source = data_prefix if isinstance(data_prefix, IndexedSource) else IndexedSource(data_prefix)
        limits = np.iinfo(source.dtype)
        if not limits.min <= pad_id <= limits.max:
            raise ConfigError(
                f"pad_id is {pad_id!r}, which does not fit the tokens of {source.prefix} ({source.dtype}); give an id "
                "of the tokenizer"
            )
        self.max_seq_length = max_seq_length
        self._packing, self._num_epochs, self._pad_last = packing, num_epochs, pad_last
        self._seed = seed if shuffle_documents else None
        resets = reset_position_ids or reset_attention_mask or cu_seqlens
        self._needs_documents = shuffle_documents or resets or eod_mask_loss
        self._cache_dir = cache_dir
        self._form = SampleForm(
            length=max_seq_length,
            position_ids=reset_position_ids or packing,
            attention_mask=reset_attention_mask,
            loss_mask=eod_mask_loss or packing or pad_last,
            cu_seqlens=cu_seqlens or packing,
            masks_ends=eod_mask_loss and not packing,  # With packing, no label is of another document.
            pad_id=pad_id,
        )
        self.read_source(source)

    def read_source(self, source: IndexedSource, share: float = 1.0) -> None:
        """Find the samples of a corpus, which replace the samples of an earlier corpus; `share` has no effect.

        Raises:
            ConfigError: The documents are too few for one sample.
        """
        self.source = source
        self._depends_on: dict[str, Any] = {
            "version": list(gpt_index.INDEX_VERSION),
            "corpus": source.fingerprint,
            "num_epochs": self._num_epochs,
            "seed": self._seed,
            "packed": ["best fit", self.max_seq_length] if self._packing else None,
        }
        pieces, firsts = self._index()
        # The last token of the stream has no next token to predict.
        pairs = pieces.total if self._packing else pieces.total - 1
        full, rest = divmod(pairs, self.max_seq_length)
        self._length = len(firsts) - 1 if firsts is not None else full + (self._pad_last and rest > 0)
        if self._length < 1:
            raise ConfigError(
                f"{source.prefix} has {len(source.tokens)} tokens in {source.num_documents} documents, which with "
                f"num_epochs={self._num_epochs} make no sample of max_seq_length {self.max_seq_length}; shorten it, "
                "repeat the corpus with num_epochs, or set pad_last=True"
            )
        self._filler = BatchFiller(source, pieces, firsts, self._form)
        used = min(self._length * self.max_seq_length, pairs)
        # A run of n pairs has n + 1 tokens. The stream is one run; with packing, each document is one run.
        runs = int((np.diff(source.document_offsets()) > 1).sum()) * self._num_epochs if self._packing else 1
        report_tokens(self, min(used + runs, len(source.tokens) * self._num_epochs))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Instance:
        check_index(index, self._length)
        rows = {name: np.empty((1, *shape), dtype) for name, (dtype, shape) in self._filler.fields.items()}
        self._filler.fill(np.array([index]), rows, {})
        return Instance(
            **{
                name: DistTensorData(np.asarray(array[0]), placement_idx=-1 if name in ("labels", "loss_mask") else 0)
                for name, array in rows.items()
            }
        )

    def read_batch(
        self,
        indices: np.ndarray,
        out: Mapping[str, np.ndarray],
        parts: Mapping[str, tuple[slice, ...]] | None = None,
    ) -> None:
        """Read samples into a batch.

        Args:
            indices: int64 [n].
            out: field -> array [n, ...] to fill.
            parts: field -> slices of a sample's dims to read, for fields that are needed only in part.
        """
        self._filler.fill(np.asarray(indices), out, parts or {})

    def fingerprint(self) -> dict[str, Any]:
        """All values that decide which tokens a sample has; the tokens are identified by the corpus's fingerprint."""
        return {**self._depends_on, "max_seq_length": self.max_seq_length, "tokens": len(self.source.tokens)}

    @property
    def repeated_by(self) -> str:
        """The argument that repeats documents in several samples, or ""."""
        return f"num_epochs={self._num_epochs}" if self._num_epochs > 1 else ""

    def _index(self) -> tuple[gpt_index.Pieces, np.ndarray | None]:
        seed, num_epochs = self._seed, self._num_epochs
        if not (self._needs_documents or self._packing):
            return gpt_index.whole_corpus(len(self.source.tokens), num_epochs), None

        def build() -> list[np.ndarray]:
            bounds = self.source.document_offsets()
            if self._packing:
                return gpt_index.packed(bounds, self.max_seq_length, num_epochs, seed)
            return list(gpt_index.documents(bounds, num_epochs, seed))

        starts, offsets, *firsts = self.source.cached("gpt", self._depends_on, build, self._cache_dir)
        return gpt_index.Pieces(starts, offsets), firsts[0] if firsts else None
