"""The console command `libai-data`."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

import libai_data
from libai_data.commands import COMMANDS, main
from tests.deadline import run_to_end


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: libai-data {name}")


def test_help_lists_every_command_and_no_or_a_mistyped_one_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name}" in shown and command.summary in shown
    assert main(["trian"]) == 2
    shown = capsys.readouterr().err
    assert "there is no command 'trian'. Did you mean 'train'?" in shown
    assert main([]) == 2
    assert "which command?" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"libai-data {libai_data.__version__}\n"


def test_the_page_of_commands_lists_each(repository: Path) -> None:
    page = (repository / "docs" / "commands.md").read_text()
    assert [name for name in COMMANDS if f"| `{name}` |" not in page] == []


def test_the_command_gets_the_arguments_after_its_name(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import pathlib, sys\npathlib.Path(__file__).with_name(sys.argv[1]).touch()")
    assert main(["launch", str(script), "--help"]) == 0
    assert (tmp_path / "--help").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("inspect CONFIG --ranks 0", "--ranks is 0"),
        ("inspect CONFIG --samples 0", "--samples is 0"),
        ("inspect CONFIG --step -1", "--step is -1"),
        ("profile CONFIG --ranks 0", "--ranks is 0"),
        *((f"profile CONFIG --seconds {seconds}", f"--seconds is {seconds}") for seconds in ("nan", "inf", "0.0")),
        ("plan CONFIG --nodes 0", "--nodes is 0"),
        ("plan CONFIG train.seed=1 --nodes 0 train.seed=2", "--nodes is 0"),
        ("train train.seed=1 --resume", "no config is given"),
        *(
            (f"doctor --config-file CONFIG --seconds {seconds}", f"--seconds is {seconds}")
            for seconds in ("nan", "0.0")
        ),
        ("doctor", "no config is given"),
        ("doctor --config-file CONFIG --seconds 1e12", "it must be above 0, and below 1e9"),
        ("doctor CONFIG --ranks 0", "doctor: error: --ranks is 0"),
        ("train-tokenizer --input TEXT --output OUT --min-frequency -1", "min_frequency is -1"),
        ("train-tokenizer --input TEXT --output OUT --extra-ids -1", "extra_ids is -1"),
        ("preprocess --input TEXT --tokenizer JSON --output-prefix OUT --log-interval 0", "--log-interval is 0"),
        ("preprocess --input TEXT --tokenizer JSON --output-prefix=", "--output-prefix is ''"),
        ("preprocess --input TEXT --tokenizer JSON --output-prefix OUT --keep-newlines", "with --split-sentences"),
        ("preprocess --input TEXT --tokenizer JSON --output-prefix OUT --do-lower-case", "lower_case is for BERT"),
        ("preprocess --input TEXT --tokenizer TXT --output-prefix OUT --merges-file TXT", "merges are for BPE"),
        ("convert TEXT --to webdataset --output OUT --workers 0", "workers is 0"),
        ("launch --stop_grace_seconds inf TEXT", "--stop_grace_seconds is inf"),
        ("launch --env NAME TEXT", "--env is for the machines of --hostfile"),
        ("inspect CONFIG --output OUT --split tset", "Did you mean 'test'?"),
        ("inspect CONFIG --output OUT --split test:1", "Did you mean 'test'?"),
        ("inspect CONFIG --output OUT --split test --step 99", "there is no step 99"),
        ("profile CONFIG --ranks 3 train.dist.tensor_parallel_size=2", "2 does not divide the 3 ranks"),
        ("plan CONFIG --nodes 5 train.dist.tensor_parallel_size=4", "tensor_parallel_size"),
        ("plan CONFIG --nodes 1000000000000", "--nodes is 1000000000000; it must be 1 to 100000"),
        ("convert TEXT --to parquet --output OUT --records-per-shard 0", "libai-data convert: records_per_shard is 0"),
        ("convert TEXT --to parquet --output TEXT", "a.jsonl/.libai_data_parts (Not a directory); give another path"),
        ("launch", "the following arguments are required: training_script\n"),
        ("plan", "the following arguments are required: config\n"),
        ("launch --ssh rsh TEXT", "--ssh is for the machines of --hostfile"),
    ],
)
def test_flags_with_odd_values_or_without_effect_are_refused(
    arguments: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = {"TEXT": tmp_path / "a.jsonl", "JSON": tmp_path / "t.json", "TXT": tmp_path / "t.txt"}
    for file in files.values():
        file.write_text('{"text": "a"}\n')
    names = {"CONFIG": "tests/engine/tiny_config.py", "OUT": str(tmp_path / "out"), **files}
    try:
        code = main([str(names.get(word, word)) for word in arguments.split()])
    except SystemExit as error:
        code = int(error.code or 0)
    told = capfd.readouterr().err
    assert code == (2 if re.search("libai-data (.*: error|preprocess|train-tokenizer): ", told) else 1)
    assert message in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["train-tokenizer --output", "preprocess --tokenizer JSON --output-prefix"])
def test_an_output_that_cannot_be_written_is_told_in_a_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a b c"}\n')
    json = str(tmp_path / "t.json")
    train = ["train-tokenizer", "--input", str(tmp_path / "a.jsonl"), "--vocab-size", "300", "--output"]
    assert main([*train, json]) == 0
    name, *options = command.replace("JSON", json).split()
    assert main([name, "--input", str(tmp_path / "a.jsonl"), *options, "/proc/nowhere/out"]) == 1
    told = capsys.readouterr().err
    assert f"libai-data {name}: " in told
    assert "No such file or directory" in told


@pytest.mark.parametrize("arguments", ["--help", "launch --help", "train-tokenizer --input TEXT --output JSON"])
def test_a_reader_that_wants_no_more_lines_ends_a_command_silently(arguments: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a b c"}\n')
    names = {"TEXT": str(tmp_path / "a.jsonl"), "JSON": str(tmp_path / "t.json")}
    heard, told = os.pipe()
    os.close(heard)
    command = [sys.executable, "-m", "libai_data", *(names.get(word, word) for word in arguments.split())]
    ended = run_to_end(command, stdout=told)
    os.close(told)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


def test_ctrl_c_ends_a_command_with_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("libai_data.commands.plan.main", interrupted)
    assert main(["plan"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "libai-data plan: interrupted\n"


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_train_names_a_variable_of_the_job_that_is_no_number(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "-1")  # as OneFlow sets it in a process that is no rank
    monkeypatch.setenv(name, "x")
    with pytest.raises(SystemExit):
        main(["train", "config.py"])
    assert f"{name} is 'x'; start the ranks by libai-data launch" in capsys.readouterr().err
