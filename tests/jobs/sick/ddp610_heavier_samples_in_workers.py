"""The shard of rank 1 has long samples, and its loader workers cannot keep up."""

# fix: Share the heavy samples out

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Texts(Dataset[Tensor]):
    """Texts of one shard, as counts of their letters."""

    def __init__(self, rank: int) -> None:
        self.texts = ["to be or not to be " * (2000 if rank == 1 else 2)] * 1120

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Tensor:
        counts = torch.zeros(32)
        numbers = [ord(letter) % 32 for letter in self.texts[index]]
        for number in set(numbers):
            counts[number] = numbers.count(number)
        return counts


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loader = DataLoader(Texts(dist.get_rank()), batch_size=16, num_workers=1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        for counts in loader:  # expect: DDP610 rank 1
            loss = model(counts).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
