from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from libai_data.config import LazyCall, LazyConfig, check_values, default_train, instantiate
from libai_data.errors import ConfigError
from tests.properties import examples


class AdamW:
    def __init__(self, params: Any = None, lr: float = 1e-3, betas: Any = (0.9, 0.999)) -> None:
        self.lr = lr


def build_loader(
    dataset: Any = None, readers: str = "every_rank", layouts: dict[str, Any] | None = None, num_workers: int = 4
) -> Any:
    return locals()


def take_all(**kwargs: Any) -> dict[str, Any]:
    return kwargs


def collate(batch: list[Any]) -> Any:
    return batch


def make_config() -> DictConfig:
    return DictConfig(
        {
            "train": default_train(),
            "optim": LazyCall(AdamW)(lr=0.1),
            "dataloader": {
                "train": LazyCall(build_loader)(layouts=None),
                "test": [LazyCall(build_loader)(num_workers=1)],
            },
            "free": LazyCall(take_all)(collate_fn=collate),
            "sizes": [1, 2, 3],
            "ref": "${train.dist}",
        },
        flags={"allow_objects": True},
    )


def changed(*overrides: str) -> Any:
    return LazyConfig.apply_overrides(make_config(), list(overrides))


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.train_iter=5", "train.train_iter", 5),
        ("optim.lr=1e-4", "optim.lr", 1e-4),
        ("train.amp.enabled=true", "train.amp.enabled", True),
        ("train.seed=null", "train.seed", None),
        ("train.output_dir=/tmp/a-b_c.d", "train.output_dir", "/tmp/a-b_c.d"),
        ("train.output_dir='a=b, c'", "train.output_dir", "a=b, c"),
        ("train.output_dir=", "train.output_dir", ""),
        ("train.global_batch_size=64", "train.global_batch_size", 64),
        ("train.evaluation.eval_metric=Acc@5", "train.evaluation.eval_metric", "Acc@5"),
        ("sizes=[4,5]", "sizes", [4, 5]),
        ("sizes.1=7", "sizes", [1, 7, 3]),
        ("sizes[1]=7", "sizes", [1, 7, 3]),
        ("dataloader.test.0.num_workers=2", "dataloader.test.0.num_workers", 2),
        ("dataloader.test[0].num_workers=2", "dataloader.test.0.num_workers", 2),
        ("train.amp={enabled:true}", "train.amp", {"enabled": True}),
        ("train.scheduler={a:1}", "train.scheduler", {"a": 1}),
        ("train.amp=null", "train.amp", None),
        ("train.seed='${train.log_period}'", "train.seed", 20),
        ("train.seed=${train.log_period}", "train.seed", 20),
        ("ref.tensor_parallel_size=4", "train.dist.tensor_parallel_size", 4),
        ("+new.deep.key=2", "new.deep.key", 2),
        ("+train.amp.level=o1", "train.amp", {"enabled": False, "level": "o1"}),
        ("+train.amp={level:o1}", "train.amp", {"enabled": False, "level": "o1"}),
        ("+sizes.3=4", "sizes", [1, 2, 3, 4]),
        ("++train.seed=text", "train.seed", "text"),
        ("++new=1", "new", 1),
        ("++trian.seed=1", "trian.seed", 1),
        ("+datamodule.folder=data", "datamodule.folder", "data"),
        ("~train.amp", "train.amp", None),
        ("~train.seed=1234", "train.seed", None),
        ("~sizes.0", "sizes", [2, 3]),
    ],
)
def test_an_override_sets_what_it_says(override: str, key: str, value: Any) -> None:
    found = OmegaConf.select(changed(override), key)
    assert (OmegaConf.to_container(found) if OmegaConf.is_config(found) else found) == value
    assert isinstance(value, (list, dict)) or type(found) is type(value)


def test_overrides_apply_in_order_and_in_place_and_delete() -> None:
    cfg = make_config()
    assert LazyConfig.apply_overrides(cfg, ["+a=1", "a=2", "++a=3"]) is cfg
    assert cfg.a == 3
    assert LazyConfig.apply_overrides(cfg, None) is cfg
    cfg = changed("~train.amp", "~sizes")
    assert "amp" not in cfg.train and "sizes" not in cfg


@pytest.mark.parametrize("overrides", [[3], "train.seed=1", 3])
def test_overrides_that_are_no_list_of_texts_are_refused(overrides: Any) -> None:
    with pytest.raises(ConfigError, match=r"overrides is .*; it must be a list of texts such as"):
        LazyConfig.apply_overrides(make_config(), overrides)
    with pytest.raises(ConfigError, match=r"cfg is \{\}; it must be a DictConfig"):
        LazyConfig.apply_overrides({}, [])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.train_iters=5", "there is no key train.train_iters. Did you mean 'train_iter'?"),
        ("trian.train_iter=5", "there is no key trian. Did you mean 'train'?"),
        ("train.dist.tensor_paralel_size=2", "train.dist.tensor_paralel_size. Did you mean 'tensor_parallel_size'?"),
        ("train.xyz=2", "Keys in train: output_dir, train_micro_batch_size"),
        ("tensor_parallel_size=2", "There is train.dist.tensor_parallel_size."),
        ("train.train_iters=5", "To add it, write +train.train_iters="),
        ("optim.learning=1", "there is no key optim.learning"),
        ("optim.learning=1", "AdamW has no such argument. Keys in optim: lr, betas"),
        ("optim.beta=1", "Did you mean 'betas'?"),
        ("train={train_iters:5}", "train.train_iters. Did you mean 'train_iter'?"),
        ("train.amp=true", "train.amp is a section with the keys enabled; true cannot replace it"),
        ("train.amp=[1]", "train.amp is a section"),
        ("dataloader.test=3", "dataloader.test is a list of 1; 3 cannot replace it"),
        ("train.seed.x=1", "train.seed is 1234, not a section, so it has no key 'x'"),
        ("train.scheduler.warmup_factor=1", "train.scheduler is null, not a section"),
        ("train.train_iter=many", "train.train_iter is a number (10000); found the text 'many'"),
        ("train.amp.enabled=ture", "is true or false (false); found the text 'ture'. Did you mean 'true'?"),
        ("sizes.3=1", "there is no sizes.3: sizes is a list with indices 0 to 2"),
        ("sizes.first=1", "sizes is a list, whose elements are sizes.0"),
        ("dataloader.test.1.num_workers=1", "there is no dataloader.test.1"),
        ("train.train_iter=1,2", "gives several values"),
        ("train.train_iter=range(1,3)", "gives several values"),
        ("+train.seed=1", "train.seed exists already (1234)"),
        ("+trian.seed=1", "there is no section 'trian'. Did you mean 'train'? To add it anyway, write ++trian"),
        ("~train.sed", "there is no key train.sed. Did you mean 'seed'?"),
        ("~train.seed=5", "train.seed is 1234, not 5"),
        ("~sizes.9", "there is no sizes.9"),
        ("train.seed", "there is no '='"),
        ("--resume", "this looks like an option of the command"),
        ("a=b=c", "in quotes"),
        ("=1", "names joined by dots"),
        ("train@x=1", "names joined by dots"),
        ("free.collate_fn=no_such_module.f", "there is no module 'no_such_module'"),
    ],
)
def test_a_wrong_override_is_refused_with_what_was_meant(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        changed(override)
    assert message in str(raised.value)
    assert str(raised.value).startswith(f"Override {override!r}")
    has_no_such_key = "there is no " in message and "=" not in message and "module" not in message
    assert isinstance(raised.value, KeyError) or not has_no_such_key


def test_a_text_in_quotes_may_replace_a_number() -> None:
    assert changed('optim.lr="0.1"').optim.lr == "0.1"
    assert changed("sizes.0='7'").sizes[0] == "7"
    with pytest.raises(ConfigError, match=r"train\.seed is '7'; it must be an int"):
        check_values(changed("train.seed='7'"))


def test_arguments_of_a_target_need_no_plus() -> None:
    cfg = changed("dataloader.train.readers=node", "optim.betas=[0.8,0.9]", "free.anything=1", "free._recursive_=false")
    assert cfg.dataloader.train.readers == "node"
    assert cfg.optim.betas == [0.8, 0.9]
    assert cfg.free.anything == 1
    assert instantiate(cfg.dataloader.train)["readers"] == "node"


def test_sections_below_an_argument_of_a_target_need_no_plus_on_the_way() -> None:
    cfg = changed(
        "dataloader.test.0.layouts.labels.placement_idx=-1",
        "dataloader.train.layouts.labels.placement_idx=-1",
        "dataloader.train.layouts.images.placement_idx=0",
    )
    assert cfg.dataloader.train.layouts.labels.placement_idx == -1
    assert cfg.dataloader.train.layouts.images.placement_idx == 0
    assert cfg.dataloader.test[0].layouts.labels.placement_idx == -1
    with pytest.raises(ConfigError, match="there is no key new"):
        changed("+new.x=1", "new.y=2")


def test_functions_and_targets_are_set_by_their_dotted_names() -> None:
    import collections

    assert changed("free.collate_fn=collections.OrderedDict").free.collate_fn is collections.OrderedDict
    cfg = changed("optim={maxlen:3,_target_:collections.deque}", "~optim.lr")
    assert cfg.optim._target_ == "collections.deque" and cfg.optim.maxlen == 3


def test_open_and_dangling_values_and_integer_keys_can_be_set_and_deleted() -> None:
    cfg = OmegaConf.create({"a": "???", "b": "${nowhere}", "c": "???"})
    LazyConfig.apply_overrides(cfg, ["a=1", "b=2", "~c"])
    assert cfg == {"a": 1, "b": 2}
    cfg = OmegaConf.create({"layers": {0: "a", -1: "b"}})
    LazyConfig.apply_overrides(cfg, ["layers.0=x"])
    assert cfg.layers == {0: "x", -1: "b"}


def test_a_config_closed_to_new_keys_can_still_be_added_to_on_purpose() -> None:
    cfg = make_config()
    OmegaConf.set_struct(cfg, True)
    LazyConfig.apply_overrides(cfg, ["+new.key=2", "optim.betas=[1,2]", "~train.amp", "+sizes.3=1"])
    assert cfg.new.key == 2 and "amp" not in cfg.train and cfg.sizes[3] == 1


_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
_texts = st.text(st.characters(blacklist_categories=["Cs", "Cc"], blacklist_characters="$\\")).filter(
    lambda t: t != "???"
)
_keys = st.from_regex(r"[a-z]{1,4}x", fullmatch=True)


def _written(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return "'" + value.replace("'", "\\'") + "'"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_written(inner)}" for key, inner in value.items()) + "}"
    return repr(value)


@settings(max_examples=examples(60))
@given(
    st.recursive(
        _scalars | _texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=2),
        max_leaves=6,
    )
)
def test_any_value_written_in_the_grammar_arrives_equal(value: Any) -> None:
    cfg = LazyConfig.apply_overrides(OmegaConf.create({}), [f"+key={_written(value)}"])
    found = cfg.key
    assert (OmegaConf.to_container(found) if OmegaConf.is_config(found) else found) == value
