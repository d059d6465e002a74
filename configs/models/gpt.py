"""A GPT-2 like language model (Radford et al., 2019) that trains on any mesh."""

from __future__ import annotations

from typing import Any

import oneflow as flow
from oneflow import nn

from configs.models import layers
from libai_data.errors import ConfigError


class GPT(nn.Module):
    """Predicts each token from those before it.

    The vocabulary is whole on every rank of the tensor axis, so that it may have any size.

    Args:
        vocab_size: tokens that exist.
        max_seq_length: longest sequence, tokens.
        dim: size of hidden states.
        depth: transformer blocks; block i is on the pipeline stage of layer i.
        num_heads: attention heads.
        mlp_ratio: hidden units of the perceptrons, in multiples of `dim`.
        seed: of the initial values.
    """

    def __init__(
        self,
        vocab_size: int = 50257,
        max_seq_length: int = 1024,
        dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: int = 4,
        seed: int = 0,
    ) -> None:
        layers.check_sizes(
            vocab_size=vocab_size,
            max_seq_length=max_seq_length,
            dim=dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
        )
        super().__init__()
        self.max_seq_length = max_seq_length
        self.token_embedding = layers.Embedding(vocab_size, dim, layer_idx=0)
        self.position_embedding = layers.PositionEmbedding(max_seq_length, dim, layer_idx=0)
        self.blocks = nn.ModuleList(
            [
                layers.TransformerBlock(dim, num_heads, mlp_ratio, max_seq_length, layer_idx=index)
                for index in range(depth)
            ]
        )
        self.norm = layers.LayerNorm(dim, layer_idx=-1)
        self.head = layers.Linear(dim, vocab_size, bias=False, layer_idx=-1)
        self.loss = layers.MeanCrossEntropy()
        layers.initialise(self, seed)

    def forward(
        self,
        input_ids: Any,
        labels: Any | None = None,
        position_ids: Any | None = None,
        attention_mask: Any | None = None,
        loss_mask: Any | None = None,
        cu_seqlens: Any | None = None,
        segment_ids: Any | None = None,
        max_seqlen: Any | None = None,
    ) -> dict[str, Any]:
        """Predicts the token after each one; the arguments are the fields of `GPTDataset`, or of packed conversations.

        Args:
            input_ids: `[batch, length]`, int64, on the first stage.
            labels: `[batch, length]`, int64, the tokens that come next, on the last stage.
            position_ids: `[batch, length]`, int64, on the first stage; by default 0, 1, 2, ...
            attention_mask: `[batch, length, length]`, bool, on the first stage: whether a token (row) sees another
                (column); by default each sees itself and those before it.
            loss_mask: `[batch, length]`, float32, on the last stage: 0 where a label does not count.
            cu_seqlens: `[batch, ends]`, int32, on the first stage: where the documents of a sample begin and end, each
                of which sees itself alone.
            segment_ids: `[batch, length]`, int64, on the first stage: the number of each token's conversation, each of
                which sees itself alone; 0 is padding.
            max_seqlen: `[batch]`, int32, the longest document of each sample, for kernels of variable length; not used.

        Returns:
            `"losses"`, the mean over the global batch's tokens that count, where there are labels; and in evaluation
            also `"prediction_scores"`, `[batch, length, vocab_size]`.

        Raises:
            ConfigError: the sequence is longer than `max_seq_length`, or several arguments say what tokens see.
        """
        if input_ids.shape[1] > self.max_seq_length:
            raise ConfigError(
                f"input_ids has {input_ids.shape[1]} tokens, but the model's max_seq_length is {self.max_seq_length}."
            )
        if sum(each is not None for each in (attention_mask, cu_seqlens, segment_ids)) > 1:
            raise ConfigError("attention_mask, cu_seqlens and segment_ids say what tokens see; give one of them.")
        if cu_seqlens is not None:
            attention_mask = _seen_within(_document_of(cu_seqlens, input_ids))
        elif segment_ids is not None:
            attention_mask = _seen_within(segment_ids)
        bias = None if attention_mask is None else _bias_of(attention_mask)
        x = self.position_embedding(self.token_embedding(input_ids), position_ids)
        for block in self.blocks:
            x = block(x, bias)
        scores = self.head(self.norm(x))
        output = {} if labels is None else {"losses": self.loss(scores, labels, loss_mask)}
        if not self.training or labels is None:
            output["prediction_scores"] = scores
        return output

    set_pipeline_stage_id = staticmethod(layers.set_pipeline_stage_id)
    set_activation_checkpoint = staticmethod(layers.set_activation_checkpoint)


def _bias_of(attention_mask: Any) -> Any:
    """What is added to attention scores, `[batch, 1, length, length]`."""
    return ((1.0 - attention_mask.to(flow.float32)) * layers.UNSEEN).unsqueeze(1)


def _document_of(cu_seqlens: Any, input_ids: Any) -> Any:
    """The number of each token's document, `[batch, length]`: so many have begun at or before it."""
    places = flow.cumsum(flow.ones_like(input_ids), dim=1) - 1
    return (cu_seqlens.unsqueeze(1) <= places.unsqueeze(2)).to(flow.int32).sum(dim=2)


def _seen_within(number: Any) -> Any:
    """`attention_mask`, by which a token sees itself and what is before it with the same number."""
    places = flow.cumsum(flow.ones_like(number), dim=1) - 1
    same = (number.unsqueeze(2) == number.unsqueeze(1)).to(flow.int32)
    return same * (places.unsqueeze(2) >= places.unsqueeze(1)).to(flow.int32)
