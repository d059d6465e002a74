from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from libai_data.errors import ConfigError
from libai_data.mesh.current import set_mesh
from libai_data.mesh.parallel_mesh import ParallelMesh

import oneflow as flow  # isort: skip

from configs.models import layers
from tests.models.placing import placed


def test_layer_norm_is_the_formula_of_the_paper() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32) * 3 + 1
    layer = layers.LayerNorm(8, eps=1e-5)
    layers.initialise(layer, 0)
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    scale = np.arange(8, dtype=np.float32)
    layer.scale.data.copy_(placed(scale))
    layer.bias.data.copy_(placed(-scale))
    np.testing.assert_allclose(layer(placed(x)).numpy(), expected * scale - scale, rtol=1e-4, atol=1e-4)


def test_mean_cross_entropy_is_the_mean_over_all_labels_and_of_mixed_ones_by_their_shares() -> None:
    random = np.random.default_rng(0)
    logits, labels = random.standard_normal((2, 3, 5)).astype(np.float32), random.integers(0, 5, (2, 3))
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_probabilities, labels[..., None], -1).mean()
    loss = layers.MeanCrossEntropy()(placed(logits), placed(labels))
    np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-5)
    shares = random.dirichlet(np.ones(5), (2, 3))
    loss = layers.MeanCrossEntropy()(placed(logits), placed(shares.astype(np.float32)))
    np.testing.assert_allclose(loss.numpy(), -(shares * log_probabilities).sum(-1).mean(), rtol=1e-5)


def test_initial_values_depend_on_the_seed_and_the_parameters_name() -> None:
    def weights(seed: int) -> Any:
        model = flow.nn.ModuleList([layers.Linear(4, 4), layers.Linear(4, 4)])
        layers.initialise(model, seed)
        return [layer.weight.numpy() for layer in model]

    first, second = weights(7)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, weights(8)[0])
    np.testing.assert_array_equal(first, weights(7)[0])


def test_constants_are_in_no_checkpoint() -> None:
    state = layers.TransformerBlock(8, 2, causal_length=4).state_dict()
    assert not [name for name in state if name.endswith(("ones", "mask"))]


def test_unknown_ways_to_be_parallel_and_features_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="parallel is 'column'; allowed: 'col', 'row', 'data'"):
        layers.Linear(4, 4, "column")
    set_mesh(ParallelMesh(1, 4, 1))
    with pytest.raises(ConfigError, match=r"Linear\(4, 10\) splits 10 features, which tensor_parallel_size=4"):
        layers.Linear(4, 10, "col")
    with pytest.raises(ConfigError, match=r"Linear\(10, 4\) splits 10 features"):
        layers.Linear(10, 4, "row")


@pytest.mark.parametrize(("dim", "num_heads"), [(12, 5), (12, 6)])
def test_heads_that_do_not_divide_are_refused_with_the_numbers(dim: int, num_heads: int) -> None:
    set_mesh(ParallelMesh(1, 4, 1))
    with pytest.raises(ConfigError, match=f"num_heads is {num_heads}.*dim={dim}.*tensor_parallel_size=4"):
        layers.SelfAttention(dim, num_heads)
