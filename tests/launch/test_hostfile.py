"""Hostfiles: what they may say, and what is wrong with the line that says something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from libai_data.errors import ConfigError
from libai_data.launch.hosts import read_hostfile


def test_machines_come_in_their_order_without_comments_and_empty_lines_and_a_missing_file_is_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\nnode-a\n\nme@10.0.0.2 slots=8  # the new one\n")
    assert read_hostfile(str(path), 8) == ["node-a", "me@10.0.0.2"]
    with pytest.raises(ConfigError, match="absent cannot be read"):
        read_hostfile(str(tmp_path / "absent"), 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nb slots=4\n", "line 2 has slots=4, but --nproc_per_node is 8"),
        ("a b c\n", "line 1 is 'a b c'; it must be 'HOST' or 'HOST slots=N'"),
        ("-oProxyCommand=anything\n", "line 1 is '-oProxyCommand=anything'"),
        ("a\n\na\n", "line 3 names a again"),
        ("# none\n", "names no machine"),
    ],
)
def test_a_wrong_line_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_hostfile(str(path), 8)
