"""Use torch in the way that the argument names, as a rank if it was started as one."""

import copy
import functools
import inspect
import os
import pickle
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

RANK = "RANK" in os.environ
DATA = TensorDataset(torch.arange(24.0).reshape(12, 2))


class MyDDP(DistributedDataParallel):
    def forward(self, *inputs, **kwargs):
        return super().forward(*inputs, **kwargs) * 1


class MyLoader(DataLoader):
    def __iter__(self):
        return map(tuple, super().__iter__())


def model(kind=DistributedDataParallel):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    return kind(made) if RANK else made


def train(made, loader, steps=8):
    optimizer = torch.optim.SGD(made.parameters(), lr=0.01)
    for _ in range(steps):
        for (batch,) in loader:
            loss = made(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    sys.stdout.write(f"{loss.item():.9g}\n")  # One write: another rank prints into the same pipe.


def fails():
    model()(torch.ones(2, 3))


def fails_on_one():
    if not RANK or dist.get_rank() == 0:
        raise ValueError("rank 0 fails")
    time.sleep(600)


def leaves():
    sys.exit(3)


def trains():
    train(model(), DataLoader(DATA, batch_size=4))


def subclasses():
    train(model(MyDDP), MyLoader(DATA, batch_size=4))
    copied = copy.deepcopy(MyLoader), copy.deepcopy(DataLoader), copy.copy(DistributedDataParallel)
    print(copied == (MyLoader, DataLoader, DistributedDataParallel), type(model(MyDDP)).__mro__[:3])


def looks():
    for thing in (
        DistributedDataParallel.forward, DataLoader.__iter__, torch.optim.Optimizer.step, torch.save,
        torch.optim.SGD.step, dist.all_reduce, dist.init_process_group, nn.Module.load_state_dict,
        nn.utils.clip_grad_norm_, torch.autograd.backward, torch.Tensor.backward,
        DistributedDataParallel, DataLoader,
    ):  # fmt: skip
        print(
            thing.__module__, thing.__qualname__, inspect.signature(thing), len(thing.__doc__ or "")
        )
        print(
            pickle.loads(pickle.dumps(thing)) is thing, isinstance(thing, type) or callable(thing)
        )
        if hasattr(thing, "__code__"):
            print(len(inspect.getsource(thing)), inspect.isfunction(thing))
        print(functools.wraps(thing)(lambda: 1).__qualname__)


def pickled():
    import cloudpickle
    import dill

    sys.modules["__main__"].__name__ = "__main__"
    for library in pickle, cloudpickle, dill:
        for thing in MyDDP, MyLoader, DataLoader(DATA), train, nn.Linear(1, 1), torch.save:
            try:
                print(library.__name__, len(library.dumps(thing)), flush=True)
            except Exception as error:
                print(library.__name__, type(error).__name__, str(error)[:60], flush=True)


def compiled():
    import torch._dynamo
    from torch._dynamo.testing import CompileCounter
    from torch._dynamo.utils import counters

    counter = CompileCounter()
    train(torch.compile(model(), backend=counter), DataLoader(DATA, batch_size=4))
    train(torch.compile(model(), backend=counter, dynamic=True), DataLoader(DATA, batch_size=5))
    print(counter.frame_count, counter.op_count, dict(counters["stats"]))


def exported():
    made = nn.Sequential(nn.Linear(2, 4), nn.ReLU())
    print(torch.export.export(made, (torch.ones(3, 2),)).graph_module.code)
    print(torch.jit.trace(made, torch.ones(3, 2)).code)


class Asks(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 3:
            raise IndexError("in a worker")
        return sys.excepthook is sys.__excepthook__, "ddpdoctor" in sys.modules or index, index


def workers(method):
    train(model(), DataLoader(DATA, batch_size=4, num_workers=2, multiprocessing_context=method), 1)
    for _, _, index in DataLoader(Asks(), num_workers=1, multiprocessing_context=method):
        print(index, flush=True)


def spawned():
    import torch.multiprocessing as mp

    print(mp.spawn(print, ("in a child",), nprocs=1))
    mp.spawn(divmod, (0,), nprocs=1)


def saved():
    torch.save(model().state_dict(), "saved.pt")
    print(torch.load("saved.pt", weights_only=True).keys(), os.path.getsize("saved.pt"))
    os.unlink("saved.pt")
    try:
        torch.save(lambda: 1, "saved.pt")
    except Exception as error:
        print(type(error).__name__)
    torch.load("nowhere.pt")


if __name__ == "__main__":
    if RANK:
        dist.init_process_group("gloo")
    globals()[sys.argv[1]](*sys.argv[2:])
    if RANK:
        dist.destroy_process_group()
