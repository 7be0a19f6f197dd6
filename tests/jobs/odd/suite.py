"""Tests for pytest to run: some pass, some fail."""

import subprocess
import sys
import threading

import pytest


def test_passes(capsys):
    print("captured")
    assert capsys.readouterr().out == "captured\n"


def test_fails():
    assert [1, 2] == [1, 3]


def test_hooks_are_those_of_python_or_pytest():
    assert "ddpdoctor" not in str(sys.excepthook) + str(threading.excepthook)


def test_exits():
    with pytest.raises(SystemExit, match="3"):
        sys.exit(3)
    done = subprocess.run([sys.executable, "-c", "import sys; sys.exit(4)"], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (4, b"", b"")


@pytest.mark.filterwarnings("error")
def test_thread():
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()


def test_leaves():
    sys.exit(5)
