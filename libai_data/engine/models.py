"""Build model, tokenizer and graphs from the `model`, `tokenization` and `graph` sections of a config."""

from __future__ import annotations

import logging
from collections.abc import Sized
from typing import Any

from omegaconf import DictConfig, ListConfig

from libai_data.config import check_keys, instantiate, try_get_key
from libai_data.config.defaults import KEYS
from libai_data.config.signatures import check_is_call
from libai_data.engine.built_parts import check_part
from libai_data.engine.setup import set_key
from libai_data.errors import ConfigError
from libai_data.mesh.current import convert_to_distributed_default_setting, get_tensor_parallel_size

logger = logging.getLogger(__name__)

_DIVISOR = "tokenization.make_vocab_size_divisible_by"
_TOKENIZATION_KEYS = ("tokenizer", "append_eod", "make_vocab_size_divisible_by")


def required_section(cfg: Any, key: str, method: str) -> Any:
    """The LazyCall at a key of the config; without it, raise ConfigError, which names the trainer's `method`."""
    section = try_get_key(cfg, key)
    if section is None:
        raise ConfigError(
            f"the config has no '{key}', such as {key} = LazyCall(...)(...), and {method} is not overridden"
        )
    check_is_call(section, key)
    return section


def build_configured_tokenizer(cfg: Any) -> Any:
    section = try_get_key(cfg, "tokenization")
    if section is None:
        return None
    check_keys(section, dict.fromkeys(_TOKENIZATION_KEYS), "tokenization")
    described = try_get_key(section, "tokenizer")
    if isinstance(described, (str, int, float, DictConfig, ListConfig)):
        check_is_call(described, "tokenization.tokenizer")
    tokenizer = instantiate(described)
    divisor = try_get_key(cfg, _DIVISOR, default=KEYS[_DIVISOR].default)
    rows = try_get_key(cfg, "model.vocab_size")
    if isinstance(rows, int) and isinstance(tokenizer, Sized) and len(tokenizer) > rows:
        raise ConfigError(
            f"model.vocab_size is {rows}, but the tokenizer has {len(tokenizer)} tokens. Set it to {len(tokenizer)} or "
            "more: for ids that an Embedding does not have, OneFlow 0.9 returns zeros, without an error"
        )
    if try_get_key(cfg, "model.cfg.vocab_size") is not None and hasattr(tokenizer, "padded_vocab_size"):
        multiple = divisor * get_tensor_parallel_size()
        cfg.model.cfg.vocab_size = tokenizer.padded_vocab_size(multiple)
    elif divisor != KEYS[_DIVISOR].default:
        raise ConfigError(
            f"{_DIVISOR} is {divisor}, but it has no effect: it needs the key model.cfg.vocab_size, and a tokenizer "
            f"with the method padded_vocab_size (it is a {type(tokenizer).__name__}). Delete {_DIVISOR}."
        )
    return tokenizer


def build_configured_model(cfg: Any) -> Any:
    """Build `cfg.model`. Its local parameters become global tensors, with the same values on all ranks."""
    section = required_section(cfg, "model", "build_model")
    amp = try_get_key(cfg, "train.amp.enabled", default=False) and try_get_key(cfg, "graph.enabled", default=False)
    for key in ("model.cfg.amp_enabled", "model.amp_enabled"):
        if try_get_key(cfg, key) is not None:
            set_key(cfg, key, bool(amp))
            break
    model = instantiate(section)
    check_part(model, "build_model")
    model._apply(convert_to_distributed_default_setting)
    logger.info("%s with %s parameters.", type(model).__name__, f"{sum(p.numel() for p in model.parameters()):,}")
    return model


def build_configured_graph(cfg: Any, model: Any, optimizer: Any, lr_scheduler: Any, is_train: bool) -> Any:
    section = required_section(cfg, "graph.train_graph" if is_train else "graph.eval_graph", "build_graph")
    settings: dict[str, Any] = {"model": model, "auto_parallel_conf": try_get_key(cfg, "graph.auto_parallel")}
    if is_train:
        settings.update(
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            fp16=try_get_key(cfg, "train.amp.enabled", default=False),
            activation_checkpoint=try_get_key(cfg, "train.activation_checkpoint.enabled", default=False),
            zero_optim=try_get_key(cfg, "train.zero_optimization.enabled", default=False),
            zero_stage=try_get_key(cfg, "train.zero_optimization.stage", default=1),
            grad_acc_steps=try_get_key(cfg, "train.num_accumulation_steps", default=1),
            global_mode=try_get_key(cfg, "graph.global_mode") or None,  # An empty section counts as no section.
        )
    graph = instantiate(section, **settings)
    debug = try_get_key(cfg, "graph.debug", default=-1)
    if debug >= 0:
        graph.debug(debug)
    return graph
