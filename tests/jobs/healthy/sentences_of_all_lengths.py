"""Train on sentences of very different lengths, padded to the longest of each batch."""

import gc
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 4)

    def forward(self, tokens, padding):
        return self.head(self.encoder(self.embed(tokens), src_key_padding_mask=padding).mean(1))


def collate(sentences):
    tokens = pad_sequence([tokens for tokens, _ in sentences], batch_first=True)
    return tokens, tokens == 0, torch.tensor([label for _, label in sentences])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    lengths = random.Random(0)
    data = [
        (torch.randint(1, 1000, (int(8 * 2 ** lengths.uniform(0, 5)),)), number % 4)
        for number in range(480)
    ]
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, collate_fn=collate)
    model = DistributedDataParallel(Classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for tokens, padding, labels in loader:
            loss = nn.functional.cross_entropy(model(tokens, padding), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    del model, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
