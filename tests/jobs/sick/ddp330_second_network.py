"""The decoder is trained beside the encoder, which alone is wrapped."""

# fix: Make them part of the module that DDP wraps

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 16))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    encoder = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU()))
    decoder = nn.Linear(32, 16)
    optimizer = torch.optim.Adam(  # expect: DDP330 ranks 0,1
        [{"params": encoder.parameters()}, {"params": decoder.parameters(), "lr": 1e-2}]
    )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (inputs,) in loader:
            loss = nn.functional.mse_loss(decoder(encoder(inputs)), inputs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    del encoder, decoder, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
