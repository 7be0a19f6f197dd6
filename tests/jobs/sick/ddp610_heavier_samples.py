"""The shard of rank 1 has long samples, which take longer to be read."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Texts(Dataset[Tensor]):
    """Texts of one shard, as counts of their letters."""

    def __init__(self, rank: int) -> None:
        self.texts = ["to be or not to be " * (150 if rank == 1 else 1)] * 2880

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Tensor:
        text = self.texts[index]
        return torch.tensor([ord(a) % 32 for a in text]).bincount().float()  # expect: DDP610 rank 1


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loader = DataLoader(Texts(dist.get_rank()), batch_size=16)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(21, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        for counts in loader:
            loss = model(counts).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
