"""Shell completion and the man page, made from the help texts."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from ddpdoctor.commands import completion
from ddpdoctor.core.commands import COMMANDS
from ddpdoctor.core.options import Described
from tools import man_page

PROBE = """
source /dev/stdin
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_ddpdoctor
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(*words: str) -> list[str]:
    """What bash offers for the last of the words."""
    done = subprocess.run(
        ["bash", "-c", PROBE, "bash", "ddpdoctor", *words],
        input=completion.bash(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.split()


def test_every_option_has_its_value_and_its_text() -> None:
    for parser in completion.parsers().values():
        described = parser.described
        assert [each.name for each in described] == list(parser.options)
        for each in described:
            assert bool(each.metavar) == (parser.options[each.name] is not None), each
            assert each.text.endswith((".", "]")), each
    known = {each.name: each for each in completion.parsers()["run"].described}
    assert known["--strict"] == Described(
        "--strict",
        "",
        "Exit with status 3 if the job succeeded but an error-level finding remains, "
        "or its code has an error.",
    )
    assert known["--wait-for-attach"].metavar == "[RANKS]"


def test_bash_completes_commands_options_and_words() -> None:
    assert completed("") == list(COMMANDS)
    assert completed("st") == ["stacks"]
    assert completed("run", "--out") == ["--output"]
    assert completed("run", "--output", "") == ["text", "problems", "github"]
    assert completed("run", "--nproc-per") == ["--nproc-per-node"]
    assert "--log" in completed("report", "--l")
    assert completed("run", "--", "train.py", "--o") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_takes_its_script(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    script = getattr(completion, shell)()
    subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_the_man_page_is_the_help() -> None:
    page = man_page.page()
    assert page == man_page.PAGE.read_text(), "python -m tools.man_page"
    assert all(f".SS ddpdoctor {name}\n" in page for name in COMMANDS)
    if shutil.which("groff") is not None:
        done = subprocess.run(
            ["groff", "-man", "-Tascii", "-ww", "-P-c"], input=page, text=True, capture_output=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "--hang-after SECONDS" in done.stdout
