"""Hostfiles: what they may say, what is wrong with the line that says something else, and what the machines get."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from libai_data.errors import ConfigError
from libai_data.launch.hosts import RemoteNode, read_hostfile, taken_along


def test_machines_come_in_their_order_without_comments_and_empty_lines_and_a_missing_file_is_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "hosts"
    # As an editor of Windows writes it.
    path.write_text("\ufeffnode-a\r\n# ours\r\n\r\nme@10.0.0.2 slots=8  # the new one\r\n", encoding="utf-8")
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
        ("a\nme@a\n", "line 2 names a again"),
        ("# none\n", "names no machine"),
    ],
)
def test_a_wrong_line_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_hostfile(str(path), 8)


def test_machines_get_variables_by_stdin_and_not_on_a_command_line(tmp_path: Path) -> None:
    sent = {f"{name}_X": "hidden" for name in ("ONEFLOW", "LIBAI_DATA", "NCCL", "CUDA", "OMP", "WANDB")}
    sent["LD_LIBRARY_PATH"] = "hidden"
    assert taken_along({**sent, "HOME": "/root", "PYTHONPATH_X": "x"}, ["WANDB_X"]) == sent
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/bash\necho "$@" > {tmp_path}/arguments\nhead -n 1 > {tmp_path}/order\n')
    ssh.chmod(0o755)
    node = RemoteNode("node-a", str(ssh), {"environment": sent})
    try:
        assert node.process.wait(60) == 0
    finally:
        node.close()
        os.close(node.output)
    assert "node-a" in (tmp_path / "arguments").read_text()
    assert "hidden" not in (tmp_path / "arguments").read_text()
    assert json.loads((tmp_path / "order").read_text()) == {"environment": sent}
