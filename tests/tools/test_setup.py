"""tools/setup.sh: which Python it takes, that it does nothing twice, and that it survives being interrupted.

The interpreters are small shell scripts that answer what setup.sh asks; nothing is installed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.deadline import printed_by
from tests.pipes import next_line

REPOSITORY = Path(__file__).resolve().parents[2]
# What setup.sh needs of the system; a PATH with no Python of the machine's own.
PROGRAMS = [
    "bash",
    "cat",
    "cp",
    "dirname",
    "flock",
    "make",
    "mkdir",
    "mkfifo",
    "mktemp",
    "mv",
    "rm",
    "sha256sum",
    "sleep",
    "sort",
    "touch",
    "uname",
]

PYTHON = """#!/bin/bash
echo "$*" >>"{root}/calls"
case "$*" in
    *python_implementation*) echo "CPython {version}" ;;
    *ensurepip*) exit {no_ensurepip} ;;
    "-m venv "*)
        mkdir -p "$3/bin"
        touch "${{TMPDIR:-{root}}}/tmpcacert.pem"
        cp "$0" "$3/bin/python"
        if [[ -p "{root}/in_venv" ]]; then echo here >"{root}/in_venv"; sleep 1000; fi
        touch "$3/has_pip"
        ;;
    *"import pip"*) [[ -e "{root}/.venv/has_pip" ]] ;;
    *--editable*)
        echo "$*" >>"{root}/installs"
        if [[ -p "{root}/in_pip" ]]; then echo here >"{root}/in_pip"; read -r _ <"{root}/go_on"; fi
        ;;
    --version) echo "Python {version}.1" ;;
esac
"""
# What pyenv puts on the PATH for an interpreter that is installed but not chosen.
REFUSING_SHIM = "#!/bin/bash\necho 'pyenv: python: command not found' >&2\nexit 127\n"


class Machine:
    """A checkout, a PATH, a pyenv root, and what was asked of the interpreters there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "bin"
        self.bin.mkdir()
        for program in PROGRAMS:
            (self.bin / program).symlink_to(shutil.which(program) or f"/bin/{program}")
        (root / "tools").mkdir()
        shutil.copy(REPOSITORY / "tools" / "setup.sh", root / "tools")
        shutil.copy(REPOSITORY / "Makefile", root)
        (root / "setup.py").write_text("one\n")
        for version in ("3.9", "3.10"):
            (root / "tools" / f"constraints-{version}.txt").write_text("numpy==1.26.4\n")

    def write(self, path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def python(self, path: str, version: str, ensurepip: bool = True) -> Path:
        text = PYTHON.format(root=self.root, version=version, no_ensurepip=int(not ensurepip))
        return self.write(self.root / path, text)

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        env: dict[str, str] = {"PATH": str(self.bin), "HOME": str(self.root / "home"), **variables}
        return subprocess.Popen(
            [str(self.bin / "bash"), *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            start_new_session=True,
        )

    def find(self, **variables: str) -> subprocess.CompletedProcess[str]:
        return finish(self.start("-c", f"source {self.root}/tools/setup.sh; find_python", **variables))

    def set_up(self, *extras: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return finish(self.start_set_up(*extras, **variables))

    def start_set_up(self, *extras: str, **variables: str) -> subprocess.Popen[str]:
        return self.start(str(self.root / "tools" / "setup.sh"), *extras, **variables)

    def calls(self, word: str) -> list[str]:
        calls = self.root / "calls"
        return [line for line in calls.read_text().splitlines() if word in line] if calls.exists() else []


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    stdout, stderr = printed_by(process)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@pytest.fixture()
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


class TestWhichPython:
    @pytest.mark.parametrize(
        ("pythons", "taken"),
        [
            pytest.param(
                {"bin/python3.8": "3.8", "bin/python3": "3.12", "bin/python3.9": "3.9", "bin/python3.10": "3.10"},
                "bin/python3.10",
                id="the newest on the PATH that OneFlow has wheels for",
            ),
            pytest.param({"bin/python3": "3.9"}, "bin/python3", id="a plain python3 of the right version"),
            pytest.param(
                {
                    f"home/.pyenv/versions/{each}/bin/python": each[:4]
                    for each in ("3.10.1", "3.10.13", "3.10.9", "3.11.7")
                },
                "home/.pyenv/versions/3.10.13/bin/python",
                id="the newest under pyenv, whose shim refuses",
            ),
            pytest.param(
                {"bin/python3.9": "3.9", "home/.pyenv/versions/3.10.13/bin/python": "3.10"},
                "home/.pyenv/versions/3.10.13/bin/python",
                id="a better version under pyenv than on the PATH",
            ),
        ],
    )
    def test_the_best_version_is_taken(self, machine: Machine, pythons: dict[str, str], taken: str) -> None:
        if taken.startswith("home"):
            machine.write(machine.bin / "python3.10", REFUSING_SHIM)
        for path, version in pythons.items():
            machine.python(path, version)
        assert machine.find().stdout == f"{machine.root / taken}\n"

    def test_one_that_cannot_make_an_environment_is_passed_over_and_named(self, machine: Machine) -> None:
        lacking = machine.python("bin/python3.10", "3.10", ensurepip=False)
        expected = machine.python("bin/python3.9", "3.9")
        result = machine.find()
        assert result.stdout == f"{expected}\n"
        assert f"passing over {lacking}" in result.stderr
        assert "apt install python3.10-venv" in result.stderr

    def test_an_activated_environment_is_not_made_from_itself(self, machine: Machine) -> None:
        machine.python(".venv/bin/python3.10", "3.10")
        expected = machine.python("bin/python3.10", "3.10")
        path = f"{machine.root}/.venv/bin:{machine.bin}"
        assert machine.find(PATH=path).stdout == f"{expected}\n"

    @pytest.mark.parametrize("is_needed", [True, False])
    def test_uv_supplies_one_when_there_is_no_other_and_is_not_asked_else(
        self, machine: Machine, is_needed: bool
    ) -> None:
        supplied = machine.python("supplied/python" if is_needed else "bin/python3.9", "3.10" if is_needed else "3.9")
        machine.write(
            machine.bin / "uv",
            f"""#!/bin/bash
touch {machine.root}/asked
case "$*" in
    "python install 3.10") touch {machine.root}/fetched ;;
    "python find --system 3.10") [[ -e {machine.root}/fetched ]] && echo {supplied} ;;
    *) exit 2 ;;
esac
""",
        )
        assert machine.find().stdout == f"{supplied}\n"
        assert [(machine.root / name).exists() for name in ("asked", "fetched")] == [is_needed] * 2

    def test_without_any_one_line_says_what_to_install(self, machine: Machine) -> None:
        machine.python("bin/python3", "3.12")
        machine.write(machine.bin / "uv", "#!/bin/bash\nexit 1\n")
        result = machine.find()
        assert result.returncode != 0
        last = result.stderr.splitlines()[-1]
        assert "3.10 or 3.9" in last
        assert "pyenv install 3.10" in last

    def test_the_one_that_the_user_names_is_taken_by_make_too_and_a_wrong_one_refused(self, machine: Machine) -> None:
        machine.python("bin/python3.10", "3.10")
        expected, wrong = machine.python("mine/python", "3.9"), machine.python("wrong/python", "3.12")
        assert machine.find(PYTHON=str(expected)).stdout == f"{expected}\n"
        result = machine.find(PYTHON=str(wrong))
        assert result.returncode != 0
        assert f"PYTHON={wrong} is not a CPython 3.9 or 3.10" in result.stderr
        result = finish(machine.start("-c", f"make -C {machine.root} setup", PYTHON=str(expected)))
        assert result.returncode == 0, result.stderr
        assert f"with {expected}" in result.stdout

    def test_resolving_for_another_version_than_the_named_one_looks_for_it(self, machine: Machine) -> None:
        machine.python("bin/python3.9", "3.9")
        result = machine.set_up("resolve", "3.9", PYTHON=str(machine.python("mine/python", "3.10")))
        assert result.returncode == 0, result.stderr
        assert "constraints-3.9.txt" in (machine.root / "installs").read_text()

    def test_a_machine_that_oneflow_has_no_wheels_for_is_refused(self, machine: Machine) -> None:
        machine.python("bin/python3.10", "3.10")
        (machine.bin / "uname").unlink()
        machine.write(machine.bin / "uname", "#!/bin/bash\necho Linux aarch64\n")
        result = machine.set_up()
        assert result.returncode == 1
        assert "Linux on x86_64 only; this is Linux aarch64" in result.stderr


class TestRunningAgain:
    @pytest.fixture(autouse=True)
    def interpreter(self, machine: Machine) -> None:
        machine.python("bin/python3.10", "3.10")

    def test_the_second_run_installs_nothing(self, machine: Machine) -> None:
        first = machine.set_up()
        assert first.returncode == 0, first.stderr
        assert "ready" in first.stdout
        assert len(machine.calls("--editable")) == 1
        calls = machine.calls("")
        again = machine.set_up()
        assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
        assert len(machine.calls("")) == len(calls) + 2  # Which version, and whether it has pip.

    @pytest.mark.parametrize("changed", ["setup.py", "tools/constraints-3.10.txt"])
    def test_a_change_of_what_is_needed_installs_with_the_constraints_into_the_same_environment(
        self, machine: Machine, changed: str
    ) -> None:
        machine.set_up()
        (machine.root / changed).write_text("numpy==1.26.3\n")
        assert machine.set_up().returncode == 0
        calls = machine.calls("--editable")
        assert len(calls) == 2
        assert all("--constraint" in call and "tools/constraints-3.10.txt" in call for call in calls)
        assert len(machine.calls("-m venv")) == 1

    @pytest.mark.parametrize(
        ("asked", "installed"),
        [
            (["dev", "test"], ["dev"]),
            (["examples", "test", "examples"], ["examples", "test"]),
            (["test", "dev"], ["test", "dev"]),
        ],
    )
    def test_an_environment_is_widened_for_what_it_lacks_and_then_serves_both(
        self, machine: Machine, asked: list[str], installed: list[str]
    ) -> None:
        printed = [machine.set_up(extras).stdout for extras in asked]
        assert [call.split("[")[-1] for call in machine.calls("--editable")] == [f"{name}]" for name in installed]
        assert len(machine.calls("-m venv")) == 1
        assert all(printed[: len(installed)]) and not any(printed[len(installed) :])

    def test_extras_that_there_are_not_are_refused(self, machine: Machine) -> None:
        refused = machine.set_up("tests")
        assert "there are no extras tests; there are examples test dev" in refused.stderr

    @pytest.mark.parametrize(
        ("within", "sent"), [("in_venv", "KILL"), ("in_pip", "INT"), ("in_pip", "TERM"), ("in_pip", "KILL")]
    )
    def test_what_was_interrupted_is_made_anew(self, machine: Machine, within: str, sent: str) -> None:
        os.mkfifo(machine.root / within)
        os.mkfifo(machine.root / "go_on")
        process = machine.start_set_up()
        (machine.root / within).read_text()
        os.killpg(process.pid, signal.Signals[f"SIG{sent}"])
        finish(process)
        assert process.returncode != 0
        assert (machine.root / ".venv" / "bin" / "python").exists()
        (machine.root / within).unlink()
        assert machine.set_up().returncode == 0
        assert len(machine.calls("-m venv")) == 2
        assert machine.set_up().stdout == ""

    def test_a_failing_installation_says_so_and_is_not_taken_for_done(self, machine: Machine) -> None:
        python = machine.bin / "python3.10"
        python.write_text(python.read_text().replace("*--editable*)", '*--editable*) echo "no network"; exit 1'))
        result = machine.set_up()
        assert result.returncode == 1
        assert "pip could not install the packages" in result.stderr
        machine.python("bin/python3.10", "3.10")
        assert machine.set_up().returncode == 0

    @pytest.mark.parametrize("extras", ["test", "dev"])
    def test_libai_is_built_after_what_builds_it_is_there(self, machine: Machine, extras: str) -> None:
        assert machine.set_up(extras).returncode == 0
        installs = [call for call in machine.calls("pip install") if "pip>=" not in call]
        assert ["--editable" in call for call in installs] == [True, False]
        assert installs[1].endswith("--no-build-isolation --no-deps flowvision==0.1.0 LiBai==0.1.1")

    def test_the_environment_is_complete_where_libai_cannot_be_built(self, machine: Machine) -> None:
        python = machine.bin / "python3.10"
        broken = '*LiBai*) echo "no compiler"; exit 1 ;;\n    *--editable*)'
        python.write_text(python.read_text().replace("*--editable*)", broken))
        result = machine.set_up()
        assert result.returncode == 0, result.stderr
        assert "the tests inside LiBai will be skipped" in result.stdout
        assert machine.set_up().stdout == ""

    def test_two_runs_at_once_install_once(self, machine: Machine) -> None:
        os.mkfifo(machine.root / "in_pip")
        os.mkfifo(machine.root / "go_on")
        first = machine.start_set_up()
        (machine.root / "in_pip").read_text()
        second = machine.start_set_up()
        assert "waiting for another setup" in next_line(second)
        (machine.root / "go_on").write_text("go on\n")
        assert finish(first).returncode == 0
        assert finish(second).returncode == 0
        assert len(machine.calls("--editable")) == 1
