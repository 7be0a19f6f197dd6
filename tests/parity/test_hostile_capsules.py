"""Files of kept steps that were made to do harm, are damaged, or were not finished."""

from __future__ import annotations

import builtins
import functools
import io
import operator
import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddpdoctor.commands import replay
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run import capsule as capsules
from ddpdoctor.run.capsule import Capsule, Forward, RefusedError, Source, StoredTensor, read, write


class Reduced:
    """An object that is unpickled by calling a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self._made = function, args

    def __reduce__(self) -> Any:
        return self._made


def find(source: Source) -> Callable[[str], Any]:
    return lambda name: functools.reduce(getattr, name.split("."), globals_of_a_script())


def globals_of_a_script() -> Any:
    class Script:
        os = os
        Reduced = Reduced

    return Script


def kept(module: Any) -> Capsule:
    states = {"torch": torch.get_rng_state()}
    return Capsule(0, 1, 3, module, {}, [Forward((torch.ones(2, 3),), {}, states)])


def written(folder: Path, value: Any) -> str:
    path = str(folder / "capsule-0000.pickle")
    write(path, kept(value), Source("/x.py", []), torch)
    return path


HARM = {
    "a program": (os.system, "touch {}"),
    "a program, otherwise": (subprocess.Popen, ["touch", "{}"]),
    "text as code": (eval, "open('{}', 'w')"),
    "text as code, otherwise": (exec, "open('{}', 'w')"),
    "a file": (open, "{}", "w"),
    "a file, by io": (io.open, "{}", "w"),
    "a file of torch": (torch.save, 1, "{}"),
    "a module of torch": (torch.hub.load, "{}"),
    "a file as a tensor": (torch.from_file, "{}", True, 1),
    "a name": (getattr, nn.Linear, "__init__"),
    "a way to names": (operator.attrgetter("__globals__"), nn.Linear.forward),
    "a module": (builtins.__import__, "os"),
}


@pytest.mark.parametrize("what", HARM)
def test_a_file_that_would_do_harm(tmp_path: Path, what: str) -> None:
    done = tmp_path / "done"
    function, *args = HARM[what]
    filled = [each.format(done) if isinstance(each, str) else each for each in args]
    if isinstance(args[0], list):
        filled = [["touch", str(done)]]
    path = written(tmp_path, Reduced(function, *filled))
    with pytest.raises(RefusedError):
        read(path, torch, find)
    assert not done.exists()


def test_harm_by_the_names_of_a_script(tmp_path: Path) -> None:
    body = pickle.dumps(Reduced(os.system, "true"), protocol=5)
    body = body.replace(
        b"\x8c\x05posix\x94\x8c\x06system", b"\x8c\x08__main__\x94\x8c\x09os.system"
    )
    path = tmp_path / "capsule-0000.pickle"
    path.write_bytes(pickle.dumps((("/x.py", []), [], body)))
    with pytest.raises(RefusedError, match=r"posix\.system"):
        read(str(path), torch, find)


def test_harm_in_the_part_with_tensors(tmp_path: Path) -> None:
    path = tmp_path / "capsule-0000.pickle"
    path.write_bytes(pickle.dumps((("/x.py", []), [Reduced(os.system, "true")], b"")))
    with pytest.raises(RefusedError, match="system"):
        read(str(path), torch, find)


@pytest.mark.parametrize("shape", [(1 << 40,), (3,), (-1, -4), (1 << 70,)])
def test_a_tensor_of_another_size(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "capsule-0000.pickle"
    stored = StoredTensor("float32", shape, b"\0" * 8)
    path.write_bytes(pickle.dumps((("/x.py", []), [stored], b"")))
    with pytest.raises(ValueError, match="another size"):
        read(str(path), torch, find)


class Usual(nn.Module):
    """A model with what models have."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.BatchNorm1d(3), nn.Dropout(0.1))
        self.attention = nn.TransformerEncoderLayer(6, 2)
        self.function = nn.functional.relu
        self.other = torch.relu
        self.method = torch.Tensor.flatten
        self.own = self.body.forward
        self.bound = functools.partial(nn.functional.gelu, approximate="tanh")
        self.kind, self.where = torch.float32, torch.device("cpu")
        self.folder = Path("/data")
        self.hook = self.body.register_forward_hook(_hook)


def _hook(module: Any, args: Any, output: Any) -> None:
    """Do nothing."""


def test_what_models_have_is_read(tmp_path: Path) -> None:
    model = Usual()
    back = read(written(tmp_path, model), torch, find).module
    assert back.function is nn.functional.relu and back.other is torch.relu
    assert back.own.__self__ is back.body and back.bound.func is nn.functional.gelu
    assert back.kind is torch.float32 and back.folder == model.folder
    assert back.method is torch.Tensor.flatten


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        written(tmp_path, nn.Linear(3, 3))
    assert not list(tmp_path.iterdir())


def test_a_rank_that_was_killed_while_it_wrote(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / f"capsule-0002.pickle{capsules.PARTIAL}").write_bytes(b"\x80")
    with pytest.raises(DoctorError, match="rank 2 ended while writing"):
        replay._file(tmp_path, None)
    written(tmp_path, nn.Linear(3, 3))
    assert replay._file(tmp_path, None).name == "capsule-0000.pickle"
    with pytest.raises(DoctorError, match="rank 2 ended while writing"):
        replay._file(tmp_path, 2)


def test_a_damaged_file_is_an_error_of_its_own(tmp_path: Path) -> None:
    data = Path(written(tmp_path, nn.Linear(3, 3))).read_bytes()
    path = tmp_path / "capsule-0000.pickle"
    for end in range(0, len(data), 97):
        path.write_bytes(data[:end])
        with pytest.raises(Exception):  # noqa: B017, PT011 (any, but no crash)
            read(str(path), torch, find)
