from __future__ import annotations

import builtins
import itertools
import pathlib
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Callable

import pytest
from omegaconf import DictConfig

from libai_data.config import LazyCall, LazyConfig, get_config, instantiate
from libai_data.errors import ConfigError

Write = Callable[[str, str], str]


@pytest.fixture
def write(tmp_path: pathlib.Path) -> Write:
    def write_file(name: str, text: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write_file


def test_dicts_and_configs_of_a_file_are_the_config(write: Write) -> None:
    file = write(
        "c.py",
        "from omegaconf import DictConfig\nimport math\n"
        "train = dict(lr=1e-4, nested=dict(f=math.sin))\nmodel = DictConfig({'x': 1})\n_own = dict(a=1)\nnumber = 3\n",
    )
    cfg = LazyConfig.load(file)
    assert isinstance(cfg.train, DictConfig) and cfg.train.lr == 1e-4 and cfg.model.x == 1
    assert set(cfg) == {"train", "model"}


def test_keys_pick_single_values(write: Write) -> None:
    file = write("c.py", "train = dict(a=1)\nnumber = 3\n")
    assert LazyConfig.load(file, "train").a == 1
    assert LazyConfig.load(file, ("number", "train"))[0] == 3
    with pytest.raises(ConfigError, match=r"c\.py defines no 'trian'\. Did you mean 'train'\?"):
        LazyConfig.load(file, "trian")


def test_relative_imports_find_files_and_folders(write: Write) -> None:
    write("common/train.py", "train = dict(lr=1)\n_hidden = 5\n")
    write(
        "common/more/__init__.py", "from ..train import train as base\nfrom . import deep\nfrom .deep import deeper\n"
    )
    write("common/more/deep.py", "deeper = dict(x=2)\nfrom . import side\nother = side.y\n")
    write("common/more/side.py", "y = dict(z=7)\n")
    write("models/vit.py", "from ..common.train import train\nmodel = dict(lr=train.lr)\n")
    file = write(
        "exp.py",
        "from .common.train import train\nfrom .common.more import base, deeper, deep\nfrom .models.vit import *\n"
        "from .common import train as module\n"
        "train.lr = 5\nseen = dict(attribute=module.train.lr, y=deep.other.z)\n",
    )
    cfg = LazyConfig.load(file)
    assert cfg.train.lr == 5 and cfg.base.lr == 1 and cfg.deeper.x == 2 and cfg.model.lr == 1
    assert cfg.seen == {"attribute": 1, "y": 7}


def test_relative_imports_within_functions_work_when_they_are_called(write: Write) -> None:
    write("other.py", "value = dict(x=1)\n")
    file = write("c.py", "def late():\n    from .other import value\n    return value\n")
    assert LazyConfig.load(file, "late")().x == 1


def test_loads_share_nothing(write: Write) -> None:
    write("base.py", "train = dict(sizes=[1])\n")
    file = write("c.py", "from .base import train\n")
    first = LazyConfig.load(file)
    first.train.sizes.append(2)
    first.train.new = 1
    assert LazyConfig.load(file).train == {"sizes": [1]}


def test_configs_imported_from_a_package_are_copies(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    root = pathlib.Path(write("a_package_of_configs/__init__.py", "")).parent.parent
    write("a_package_of_configs/base.py", "from omegaconf import DictConfig\ntrain = DictConfig({'lr': 1})\n")
    monkeypatch.syspath_prepend(str(root))
    for star in ("train", "*"):
        file = write("c.py", f"from a_package_of_configs.base import {star}\ntrain.lr += 1\n")
        assert LazyConfig.load(file).train.lr == 2
        assert LazyConfig.load(file).train.lr == 2
    import a_package_of_configs.base as base  # type: ignore[import-not-found]

    assert base.train.lr == 1


def test_loading_leaves_imports_and_modules_as_they_were(write: Write) -> None:
    write("bad.py", "raise KeyError('mine')\n")
    before_import, before_modules = builtins.__import__, set(sys.modules)
    with pytest.raises(ConfigError, match=r"bad\.py, line 1: KeyError: 'mine'"):
        LazyConfig.load(write("c.py", "from .bad import x\n"))
    LazyConfig.load(write("d.py", "import math\nx = dict(a=1)\n"))
    assert builtins.__import__ is before_import
    assert not [name for name in set(sys.modules) - before_modules if "config_file" in name]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"c.py": "x = 1\nimport no_such\n"}, r"c\.py, line 2: ModuleNotFoundError: No module named 'no_such'"),
        ({"c.py": "a = {}\nb = a['c']\n"}, r"c\.py, line 2: KeyError: 'c'"),
        ({"c.py": "a = {'b': {None: 1}}\n"}, r"a of .*c\.py cannot be a section of a config: .*key type 'NoneType'$"),
        ({"b.py": "a = {(1, 2): 3}\n", "c.py": "from .b import a\n"}, r"a of .*b\.py cannot be .*key type 'tuple'$"),
        ({"c.py": "a = {}\na['a'] = a\n"}, r"a of .*c\.py cannot be a section of a config: maximum recursion depth"),
        ({"c.py": "import oneflow, sys\nsys.exit(0)\n"}, r"c\.py, line 2: SystemExit: 0"),
        (
            {"c.py": "from omegaconf import DictConfig\nx = DictConfig({}, flags={'struct': True}).a\n"},
            r"c\.py, line 2: ConfigAttributeError",
        ),
        (
            {"c.py": "from libai_data.config import LazyCall\n\nx = LazyCall(dict)(1)\n"},
            r"c\.py, line 3: LazyCall.dict. takes keyword",
        ),
        ({"b.py": "x = 1\ny = = 2\n", "c.py": "from .b import x\n"}, r"b\.py, line 2: .*y = = 2"),
        ({"c.py": "x = '\0'\n"}, r"c\.py"),
        (
            {"train.py": "train = dict()\n", "c.py": "from .train import trian\n"},
            r"train\.py defines no 'trian'\. Did you mean 'train'\?",
        ),
        (
            {"folder/a.py": "", "c.py": "from .folder import b\n"},
            r"folder defines no 'b'\. Config files in .*folder: a\.py\.",
        ),
        (
            {"a.py": "from .c import x\n", "c.py": "from .a import x\n"},
            r"in a circle: .*c\.py imports .*a\.py imports .*c\.py",
        ),
    ],
)
def test_what_is_wrong_in_config_files_is_told_with_file_and_line_alone(
    write: Write, tmp_path: pathlib.Path, files: dict[str, str], message: str
) -> None:
    for name, text in files.items():
        write(name, text)
    with pytest.raises(ConfigError, match=message) as raised:
        LazyConfig.load(str(tmp_path / "c.py"))
    assert raised.value.__cause__ is None


def test_what_a_users_module_raises_while_a_config_imports_it_keeps_its_traceback(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = pathlib.Path(write("a_broken_module.py", "def broken():\n    return 1 / 0\n\n\nbroken()\n")).parent
    monkeypatch.syspath_prepend(str(root))
    with pytest.raises(ConfigError, match=r"c\.py, line 1: ZeroDivisionError") as raised:
        LazyConfig.load(write("c.py", "import a_broken_module\n"))
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_threads_load_at_the_same_time(write: Write) -> None:
    files = []
    for number in range(4):
        write(f"f{number}/base.py", f"train = dict(number={number})\n")
        files.append(write(f"f{number}/c.py", "from .base import train\nimport json\n"))

    def loaded(file: str) -> set[int]:
        return {LazyConfig.load(file).train.number for _ in range(20)}

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(loaded, files)) == [{0}, {1}, {2}, {3}]


def test_dataclasses_and_classes_may_be_defined_in_a_config(write: Write) -> None:
    file = write(
        "c.py",
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from libai_data.config import LazyCall\n"
        "@dataclass\nclass Thing:\n    x: int = 1\n"
        "class Plain:\n    def __init__(self, y): self.y = y\n"
        "thing = LazyCall(Thing)(x=5)\nplain = LazyCall(Plain)(y=6)\n",
    )
    cfg = LazyConfig.load(file)
    assert instantiate(cfg.thing).x == 5 and instantiate(cfg.plain).y == 6


def test_a_missing_config_names_the_path_and_its_neighbours(write: Write, tmp_path: pathlib.Path) -> None:
    write("vit_digits.py", "")
    with pytest.raises(ConfigError, match=r"tried .*vit_digit\.py\. Did you mean 'vit_digits\.py'\?"):
        LazyConfig.load(str(tmp_path / "vit_digit.py"))
    with pytest.raises(ConfigError, match=r"Config files in .*: vit_digits\.py\."):
        LazyConfig.load(str(tmp_path / "zzz.py"))
    with pytest.raises(ConfigError, match=r"must end in \.py, \.yaml or \.yml"):
        LazyConfig.load(str(tmp_path / "vit_digits"))
    with pytest.raises(ConfigError, match="is a folder"):
        LazyConfig.load(str(tmp_path))


def test_a_relative_import_of_a_missing_file_names_both_files(write: Write) -> None:
    write("train.py", "train = dict()\n")
    with pytest.raises(ConfigError) as raised:
        LazyConfig.load(write("c.py", "from .trian import train\n"))
    message = str(raised.value)
    assert "c.py says `from .trian import train`" in message and "trian.py" in message
    assert "Did you mean 'train.py'" in message
    assert isinstance(raised.value, ImportError)


def test_load_rel_counts_from_the_file_that_calls(write: Write) -> None:
    write("common/train.py", "train = dict(lr=3)\n")
    file = write(
        "c.py", "from libai_data.config import LazyConfig\ntrain = LazyConfig.load_rel('common/train.py', 'train')\n"
    )
    assert LazyConfig.load(file).train.lr == 3
    with pytest.raises(ConfigError, match="load_rel"):
        exec("LazyConfig.load_rel('x.py')", {"LazyConfig": LazyConfig})


@pytest.mark.parametrize(
    ("path", "keys"),
    [
        ("common/train.py", ["train"]),
        ("common/optim.py", ["optim"]),
        ("common/models/graph.py", ["graph"]),
        ("common/data/cifar100.py", ["dataloader", "test_aug", "train_aug"]),
        ("common/data/imagenet.py", ["dataloader", "test_aug", "train_aug"]),
    ],
)
def test_the_configs_of_the_package_are_loaded_anew_by_libais_paths(path: str, keys: list[str]) -> None:
    cfg = get_config(path)
    assert sorted(cfg) == keys
    del cfg[keys[0]]
    assert sorted(get_config(path)) == keys


def test_a_config_that_the_package_does_not_have_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'train\.py'"):
        get_config("common/trian.py")


def test_yaml_is_read_as_configs_mean_it(write: Write) -> None:
    cfg = LazyConfig.load(
        write("c.yaml", "optim: {lr: 1e-4, eps: 1.5e-08, t: 2024-01-01, n: null}\nlist: [1, {a: b}]\n")
    )
    assert cfg.optim.lr == 1e-4 and cfg.optim.eps == 1.5e-8 and cfg.optim.t == "2024-01-01" and cfg.optim.n is None
    assert cfg.list[1].a == "b"
    assert LazyConfig.load(write("empty.yaml", "")) == {}
    assert LazyConfig.load(write("k.yml", "a: {b: 1}\n"), "a").b == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2\nb: 3\n", "line 2"),
        ("a: 1\nb: 2\na: 3\n", "line 3: found duplicate key a"),
        ("a: !!python/object/apply:os.getcwd []\n", "line 1: could not determine a constructor"),
        ("a:\n  b: !name collections.OrderedDic\n", "line 2: .*Did you mean 'OrderedDict'"),
        ("a: !unsaved a lambda\n", "line 1: this value could not be saved .a lambda."),
        ("- 1\n", "must be a mapping"),
        ("a: \0\n", "not valid YAML"),
        ("a: {null: 1}\n", "c.yaml cannot be a section of a config: .*key type 'NoneType'$"),
    ],
)
def test_malformed_yaml_is_refused_with_its_line(write: Write, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        LazyConfig.load(write("c.yaml", text))
    assert "c.yaml" in str(raised.value)


def test_a_saved_config_builds_the_same(write: Write, tmp_path: pathlib.Path) -> None:
    write("common/train.py", "train = dict(lr=1e-4, sizes=(1, 2), collate=len)\n")
    file = write(
        "c.py",
        "import collections\nfrom libai_data.config import LazyCall\nfrom .common.train import train\n"
        "thing = LazyCall(collections.OrderedDict)(a=1e-8, b=LazyCall(dict)(x=None, y='${train.lr}'))\n",
    )
    cfg = LazyConfig.load(file)
    LazyConfig.save(cfg, tmp_path / "saved.yaml")
    loaded = LazyConfig.load(tmp_path / "saved.yaml")
    assert loaded.train == cfg.train and loaded.train.collate is len
    assert instantiate(loaded.thing) == instantiate(cfg.thing) == {"a": 1e-8, "b": {"x": None, "y": 1e-4}}
    assert loaded.thing._target_ == "collections.OrderedDict"


def test_a_config_is_shown_as_the_statements_that_make_it() -> None:
    """The example of LiBai's own tests, with a reference, a function and a key that is no name."""
    cfg = DictConfig(
        {
            "section": {"b": 2, "a": "modified"},
            "lazyobj": LazyCall(itertools.count)(
                y="base_a_1_from_b",
                x={"a": 1, "b": 2, "c": LazyCall(itertools.count)(x={"r": "a", "s": 2.4, "t": [1, 2, 3, "z"]})},
            ),
            "list": ["a", 1, "b", 3.2],
            "same": "${section.b}",
            "function": len,
            "no-name": None,
            "quotes": 'it is "so"',
            "empty": {},
        },
        flags={"allow_objects": True},
    )
    assert (
        LazyConfig.to_py(cfg)
        == """\
cfg.empty = {}
cfg.function = builtins.len
cfg.lazyobj = itertools.count(
    x={
        "a": 1,
        "b": 2,
        "c": itertools.count(x={"r": "a", "s": 2.4, "t": [1, 2, 3, "z"]}),
    },
    y="base_a_1_from_b",
)
cfg.list = ["a", 1, "b", 3.2]
cfg["no-name"] = None
cfg.quotes = 'it is "so"'
cfg.same = 2
cfg.section.a = "modified"
cfg.section.b = 2
"""
    )
    assert LazyConfig.to_py(cfg.section, prefix="") == 'a = "modified"\nb = 2\n'
