"""Let rank 0 write metrics and a checkpoint every few steps, in a thread that nobody waits for."""

import gc
import io
import queue
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def write(entries):
    while (entry := entries.get()) is not None:
        torch.save(entry, io.BytesIO())


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(1920, 128), torch.randint(0, 4, (1920,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    network = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    model = DistributedDataParallel(nn.Sequential(network, nn.Linear(512, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    entries = queue.Queue()
    writer = threading.Thread(target=write, args=(entries,))
    writer.start()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, (batch, target) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(batch), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0 and step % 5 == 0:
                entries.put({"loss": loss.item(), "norm": model.module[1].weight.norm().item()})
            if rank == 0 and step % 20 == 0:
                entries.put({name: each.clone() for name, each in model.state_dict().items()})
    entries.put(None)
    writer.join()
    del model, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
