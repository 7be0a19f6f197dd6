"""A classifier with a loss of several kinds, by word, for steps that are computed again.

``module``, ``smoothed``, ``two``, ``custom`` and ``sizes`` can be followed; ``returned`` is a loss
of the model; ``numbers`` and ``noise`` cannot be followed; ``sum`` grows with the batch.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES = 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(10, 16)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, inputs: Tensor) -> Any:
        return self.head(self.drop(self.body(inputs).relu()))


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(10, CLASSES)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(inputs)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def focal(logits: Tensor, labels: Tensor, gamma: float = 2.0) -> Tensor:
    chances = torch.softmax(logits, dim=-1)
    right = chances[torch.arange(len(labels)), labels]
    return -((1 - right) ** gamma * torch.log(right + 1e-8)).mean()


def loss_of(word: str, logits: Tensor, labels: Tensor) -> Tensor:
    if word == "smoothed":
        return functional.cross_entropy(logits, labels, label_smoothing=0.1)
    if word == "two":
        one_hot = functional.one_hot(labels, CLASSES).float()
        return functional.cross_entropy(logits, labels) + 0.5 * functional.mse_loss(
            logits.sigmoid(), one_hot
        )
    if word == "custom":
        return focal(logits, labels)
    if word == "sizes":
        rows, classes = logits.shape
        return functional.nll_loss(logits.log_softmax(-1).view(rows, classes), labels.view(rows))
    if word == "numbers":
        spreads = [float(each.std()) for each in logits.detach().unbind(1)]
        weights = torch.tensor([1.0 / (1.0 + each) for each in spreads])
        each = functional.cross_entropy(logits, labels, reduction="none")
        return (each * weights[labels]).mean()
    if word == "noise":
        return functional.cross_entropy(logits + 0.1 * torch.randn_like(logits), labels)
    if word == "sum":
        return functional.cross_entropy(logits, labels, reduction="sum")
    loss: Tensor = nn.CrossEntropyLoss()(logits, labels)
    return loss


def main() -> None:
    word = sys.argv[1]
    dist.init_process_group("gloo")
    made = torch.Generator().manual_seed(0)
    features = torch.randn(160, 10, generator=made)
    data = TensorDataset(features, torch.randint(0, CLASSES, (160,), generator=made))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(WithLoss() if word == "returned" else Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * dist.get_world_size())
    for inputs, labels in loader:
        optimizer.zero_grad()
        if word == "returned":
            loss = model(inputs, labels=labels)["loss"]
        else:
            loss = loss_of(word, model(inputs), labels)
        torch.autograd.backward([loss])
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
