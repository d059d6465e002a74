"""Layers for global tensors: SBP says what the tensor axis splits, placement says which pipeline stage holds a layer.

Hidden states are `[batch, sequence, dim]`, split over the data axis and the same on the tensor axis (`get_hidden_sbp`).
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import oneflow as flow
from oneflow import nn

from libai_data.errors import ConfigError
from libai_data.mesh import get_layer_placement, get_mesh, get_nd_sbp, get_tensor_parallel_size

broadcast, split = flow.sbp.broadcast, flow.sbp.split

UNSEEN = -1e9
"""Added to the attention scores of what is not to be seen."""


def check_sizes(**sizes: int) -> None:
    """Refuses what is no size, which OneFlow would refuse without its name."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"{name} is {size!r}; it must be an int, at least 1.")


class StageModule(nn.Module):
    """A module whose parameters lie on the pipeline stage of one layer.

    Args:
        layer_idx: the layer; a negative one counts from the end.
    """

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.placement = get_layer_placement(layer_idx)

    def parameter(self, shape: list[int], tensor_sbp: Any = broadcast) -> nn.Parameter:
        """Returns a parameter (float32, its values come from `initialise`) with `tensor_sbp` over the tensor axis."""
        sbp = get_nd_sbp([broadcast, tensor_sbp])
        return nn.Parameter(flow.zeros(*shape, dtype=flow.float32, placement=self.placement, sbp=sbp))

    def constant(self, name: str, value: np.ndarray) -> None:
        """Keeps `value`, float32, as the attribute `name`: the same on all ranks of the stage, and in no checkpoint."""
        sbp = get_nd_sbp([broadcast, broadcast])
        tensor = flow.from_numpy(value).to_global(placement=self.placement, sbp=sbp)
        self.register_buffer(name, tensor, persistent=False)

    def to_stage(self, x: Any) -> Any:
        """Returns `x` on this module's stage: what crosses from one pipeline stage to the next."""
        return x.to_global(placement=self.placement)


class Linear(StageModule):
    """`x @ weight.T + bias`.

    Args:
        in_features: size of the input's last dim.
        out_features: size of the output's last dim.
        parallel: what the tensor axis splits: `"col"` the outputs, `"row"` the inputs (what a `"col"` layer put out),
            `"data"` nothing.
        bias: whether to add one.
        layer_idx: the layer.
    """

    def __init__(
        self, in_features: int, out_features: int, parallel: str = "data", bias: bool = True, *, layer_idx: int = 0
    ) -> None:
        super().__init__(layer_idx)
        if parallel not in ("col", "row", "data"):
            raise ConfigError(f"parallel is {parallel!r}; allowed: 'col', 'row', 'data'.")
        divided = {"col": out_features, "row": in_features, "data": 0}[parallel]
        if divided % get_tensor_parallel_size():
            raise ConfigError(
                f"A {parallel!r} parallel Linear({in_features}, {out_features}) splits {divided} features, which "
                f"tensor_parallel_size={get_tensor_parallel_size()} does not divide: change one of them, or use 'data'."
            )
        self.parallel = parallel
        weight_sbp = {"col": split(0), "row": split(1), "data": broadcast}[parallel]
        self.weight = self.parameter([out_features, in_features], weight_sbp)
        bias_sbp = split(0) if parallel == "col" else broadcast
        self.bias = self.parameter([out_features], bias_sbp) if bias else None

    def forward(self, x: Any) -> Any:
        if self.parallel == "col":
            # Each tensor rank has the gradient of its own outputs: this sums them before anything else uses the sum.
            x = x.to_global(grad_sbp=x.sbp)
        x = flow.matmul(x, self.weight, transpose_b=True)
        if self.parallel == "row":
            x = x.to_global(sbp=get_nd_sbp([split(0), broadcast]))  # sums what the tensor ranks have each
        return x if self.bias is None else x + self.bias


class LayerNorm(StageModule):
    """Normalisation over the last dim (Ba et al., https://arxiv.org/abs/1607.06450).

    Spelt out, because OneFlow's own operator has no CPU kernel. Means are widened to the size of `x` by a product with
    ones, which is exact: OneFlow's CPU kernels for broadcasting along the last dim take 40 times as long.

    Args:
        dim: size of the last dim.
        layer_idx: the layer.
        eps: added to the variance.
    """

    def __init__(self, dim: int, *, layer_idx: int = 0, eps: float = 1e-5) -> None:
        super().__init__(layer_idx)
        self.eps = eps
        self.scale = self.parameter([dim])
        self.bias = self.parameter([dim])
        self.constant("ones", np.ones((1, dim), np.float32))

    def forward(self, x: Any) -> Any:
        centred = x - flow.matmul(x.mean(-1, keepdim=True), self.ones)
        variance = (centred * centred).mean(-1, keepdim=True)
        return centred * flow.matmul(flow.rsqrt(variance + self.eps), self.ones) * self.scale + self.bias


class Embedding(StageModule):
    """A learned vector for each index.

    Args:
        num_embeddings: indices.
        dim: size of a vector.
        layer_idx: the layer.
    """

    def __init__(self, num_embeddings: int, dim: int, *, layer_idx: int = 0) -> None:
        super().__init__(layer_idx)
        self.weight = self.parameter([num_embeddings, dim])

    def forward(self, indices: Any) -> Any:
        return flow._C.gather(self.weight, indices, axis=0)


class PositionEmbedding(StageModule):
    """Adds a learned vector for each place in the sequence, or for each of the places that are given.

    Args:
        length: longest sequence.
        dim: size of a vector.
        layer_idx: the layer.
    """

    def __init__(self, length: int, dim: int, *, layer_idx: int = 0) -> None:
        super().__init__(layer_idx)
        self.weight = self.parameter([length, dim])

    def forward(self, x: Any, positions: Any = None) -> Any:
        if positions is not None:
            return x + flow._C.gather(self.weight, positions, axis=0)
        return x + self.weight[: x.shape[1]]


class SelfAttention(StageModule):
    """Multi-head self-attention; the tensor axis splits the heads.

    Args:
        dim: size of hidden states.
        num_heads: heads; it divides `dim`, and the tensor size divides it.
        causal_length: longest sequence, where each place sees only itself and those before it; 0 lets it see all.
        layer_idx: the layer.
    """

    def __init__(self, dim: int, num_heads: int, causal_length: int = 0, *, layer_idx: int = 0) -> None:
        super().__init__(layer_idx)
        if dim % num_heads or num_heads % get_tensor_parallel_size():
            raise ConfigError(
                f"num_heads is {num_heads}; it must divide dim={dim} and be a multiple of "
                f"tensor_parallel_size={get_tensor_parallel_size()}."
            )
        self.num_heads = num_heads
        self.causal = causal_length > 0
        self.query_key_value = Linear(dim, 3 * dim, "col", layer_idx=layer_idx)
        self.out = Linear(dim, dim, "row", layer_idx=layer_idx)
        if self.causal:
            # Added to the scores: 0 where a row's place may look, and very low after it.
            self.constant("mask", np.triu(np.full((causal_length, causal_length), UNSEEN, np.float32), k=1))

    def forward(self, x: Any, bias: Any = None) -> Any:
        """Attends.

        Args:
            x: `[batch, length, dim]`.
            bias: `[batch, 1, length, length]`, added to the scores of each place (row) for each other one, in the stead
                of what `causal_length` adds.
        """
        batch, length, dim = x.shape
        head_dim = dim // self.num_heads
        # [batch, heads, length, 3 * head_dim]: heads outermost in the features, so that splitting these splits heads.
        heads = self.query_key_value(x).view(batch, length, self.num_heads, 3 * head_dim).permute(0, 2, 1, 3)
        query, key, value = flow.chunk(heads, 3, dim=-1)
        scores = flow.matmul(query, key, transpose_b=True, alpha=head_dim**-0.5)
        if bias is not None:
            scores = scores + bias
        elif self.causal:
            scores = scores + self.mask[:length, :length]
        attended = flow.matmul(flow.softmax(scores, dim=-1), value)
        return self.out(attended.transpose(1, 2).flatten(2))


class TransformerBlock(StageModule):
    """Attention and a two-layer perceptron, each behind a LayerNorm and beside a residual path.

    The perceptron's activation is ReLU: GELU takes 30 times as long on a CPU. There is no dropout: OneFlow draws its
    masks from each rank's own generator, so that the losses would depend on the mesh. Random transforms of the
    samples, which draw from (seed, epoch, index), do not.

    Args:
        dim: size of hidden states.
        num_heads: attention heads.
        mlp_ratio: hidden units of the perceptron, in multiples of `dim`.
        causal_length: as in `SelfAttention`.
        layer_idx: the layer.
    """

    def __init__(
        self, dim: int, num_heads: int, mlp_ratio: int = 4, causal_length: int = 0, *, layer_idx: int = 0
    ) -> None:
        super().__init__(layer_idx)
        self.attention_norm = LayerNorm(dim, layer_idx=layer_idx)
        self.attention = SelfAttention(dim, num_heads, causal_length, layer_idx=layer_idx)
        self.mlp_norm = LayerNorm(dim, layer_idx=layer_idx)
        self.expand = Linear(dim, mlp_ratio * dim, "col", layer_idx=layer_idx)
        self.contract = Linear(mlp_ratio * dim, dim, "row", layer_idx=layer_idx)

    def forward(self, x: Any, bias: Any = None) -> Any:
        x = self.to_stage(x)
        x = x + self.attention(self.attention_norm(x), None if bias is None else self.to_stage(bias))
        return x + self.contract(flow.relu(self.expand(self.mlp_norm(x))))


class MeanCrossEntropy(StageModule):
    """Cross entropy, averaged over what counts of the global batch: the same number on every rank of the last stage."""

    def __init__(self) -> None:
        super().__init__(layer_idx=-1)

    def forward(self, logits: Any, labels: Any, counts: Any = None) -> Any:
        """Compares predictions with labels.

        Args:
            logits: `[..., classes]`, float32.
            labels: `[...]`, int64; or, where they are mixed, `[..., classes]`, float32.
            counts: `[...]`, float32, 0 where a label does not count and else 1; by default all do.

        Returns:
            A scalar, broadcast; 0 if nothing counts.
        """
        everywhere = get_nd_sbp([broadcast, broadcast])
        labels = self.to_stage(labels)
        if labels.ndim == logits.ndim:
            losses = -(labels * flow.log_softmax(logits, dim=-1)).sum(dim=-1).view(-1)
        else:
            losses = flow._C.sparse_softmax_cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
        if counts is None:
            return losses.mean().to_global(sbp=everywhere)
        counts = self.to_stage(counts).view(-1)
        total = counts.sum().to_global(sbp=everywhere)
        return (losses * counts).sum().to_global(sbp=everywhere) / total.clamp(min=1.0)


def initialise(model: nn.Module, seed: int) -> None:
    """Fills each parameter with values that depend on (seed, its name, its global shape) alone: the same on any mesh.

    Weights are normal with deviation 1 / sqrt(inputs). Embeddings have 0.5, as large as what they are added to: where
    positions start at 0.02, a small image model hardly learns them. Scales are 1 and biases 0.

    Args:
        model: a model whose parameters are global tensors.
        seed: of the job.
    """
    for name, parameter in model.named_parameters():
        value = _initial_value(name, tuple(parameter.shape), seed)
        everywhere = [broadcast] * len(parameter.sbp)
        whole = flow.from_numpy(value).to_global(placement=parameter.placement, sbp=everywhere)
        parameter.data.copy_(whole.to_global(sbp=parameter.sbp))


def _initial_value(name: str, shape: Any, seed: int) -> np.ndarray:
    if name.endswith(".scale"):
        return np.ones(shape, np.float32)
    if name.endswith(".bias"):
        return np.zeros(shape, np.float32)
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    deviation = 0.5 if "embedding" in name else shape[-1] ** -0.5
    return (random.standard_normal(shape) * deviation).astype(np.float32)


def set_pipeline_stage_id(model: Any) -> None:
    """Tells nn.Graph the stage of each module, so that it runs the stages of several micro-batches side by side.

    Args:
        model: the model as an `nn.Graph` holds it.
    """
    mesh = get_mesh()
    for module in model.modules():
        origin = module.to(nn.Module)
        if isinstance(origin, StageModule):
            stage = mesh.layer_stage(origin.layer_idx)
            module.to(nn.graph.GraphModule).set_stage(stage, get_layer_placement(origin.layer_idx))


def set_activation_checkpoint(model: Any) -> None:
    """Tells nn.Graph to compute the blocks again in the backward pass instead of keeping their activations.

    Args:
        model: the model as an `nn.Graph` holds it.
    """
    for module in model.modules():
        if isinstance(module.to(nn.Module), TransformerBlock):
            module.to(nn.graph.GraphModule).activation_checkpointing = True
