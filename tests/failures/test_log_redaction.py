"""`report --log --redact`: no names of hosts and users, no addresses, no secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.commands import report
from ddpdoctor.failures.lines import Redactor


def test_names_addresses_and_secrets_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.log"
    with path.open("w") as file:
        file.write(
            "srun: error: gpu17: task 3: Exited with exit code 1\n"
            'Traceback (most recent call last):\n  File "/home/alice/a.py", line 3, in <module>\n'
            "    main()\nValueError: no token=abcdef0123 for alice@lab.org at 10.3.4.5 on gpu17, "
            "hf_abcdefghijklmnopqrst\n"
        )
    for options in (["--json"], []):
        assert report.main(["--log", "--redact", *options, str(path)]) == 2
        said = capsys.readouterr().out
        for name in ("alice", "gpu17", "10.3.4.5", "hf_abc", "abcdef0123", "lab.org"):
            assert name not in said
        assert "<user-1>" in said
        assert "ValueError: no token=<secret>" in said


def test_the_same_name_is_replaced_by_the_same() -> None:
    redactor = Redactor()
    first, second = redactor.text("at 10.0.0.1 and 10.0.0.2"), redactor.text("10.0.0.2")
    assert first == "at <address-1> and <address-2>"
    assert second == "<address-2>"
    assert redactor.text("127.0.0.1 NCCL version 2.14.3 12:00:00") == (
        "127.0.0.1 NCCL version 2.14.3 12:00:00"
    )


@pytest.mark.parametrize(
    ("path", "posted"),
    [
        ("/home/alice/train.py", "/home/<user-1>/train.py"),
        ("/home/alice/job/train.py", "/home/<user-1>/.../train.py"),
        ("/auto/home/users/d/a/alice/train.py", "/auto/home/users/d/a/<user-1>/train.py"),
        ("/users/9/alice/train.py", "/users/9/<user-1>/train.py"),
        ("/home/userexternal/alice/train.py", "/home/userexternal/<user-1>/train.py"),
        (r"C:\Users\alice\train.py", r"C:\Users\<user-1>\train.py"),
        (r"C:\Users\alice\job\train.py", r"C:\Users\<user-1>\...\train.py"),
        # What stands first may be a group's, a laboratory's or a cluster's.
        ("/home/lab/alice/train.py", "/home/<user-1>/.../train.py"),
        ("/home/dept/lab/alice/job/train.py", "/home/<user-1>/.../job/train.py"),
        ("/scratch/tiger/ab1234/job/train.py", "/scratch/<user-1>/.../train.py"),
        ("/home/ubuntu/alice/train.py", "/home/ubuntu/.../train.py"),
        ("/home/lab/alice/lib/site-packages/a/b.py", "/home/<user-1>/.../site-packages/a/b.py"),
        ("/nfs/data/alice/job/ab/train.py:3", "/.../ab/train.py:3"),
        ("/u6/alice/train.py", "/.../train.py"),
        ("/env/lib/site-packages/torch/a.py", "/.../site-packages/torch/a.py"),
        ("/dev/shm/nccl-1/x https://a.org/b/c/d", "/dev/shm/nccl-1/x https://a.org/b/c/d"),
        # A folder's name is a word, which stands for something else in other places.
        ("/home/alice/torch/a.py: torch", "/home/<user-1>/.../a.py: torch"),
        ("/home/data/train/a.py train data 3", "/home/data/.../a.py train data 3"),
    ],
)
def test_a_user_is_found_where_clusters_sort_their_users(path: str, posted: str) -> None:
    assert Redactor().text(path) == posted == Redactor().text(posted)


@pytest.mark.parametrize("piece", [";//", "@/", ";/a", "[/a<", "/home/", "a/", "token", "a."])
def test_a_hostile_line_is_read_through(piece: str) -> None:
    """Beside a limit of CPU time there is none: ten times as much takes ten times as long."""
    line = piece * (1 << 14) + "<"
    assert Redactor().text(line)
