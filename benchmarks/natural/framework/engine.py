"""A small training framework: the loop is here, what is trained comes from outside."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Callback:
    def on_step_end(self, engine, loss):
        pass

    def on_epoch_end(self, engine):
        pass


class Engine:
    def __init__(self, model, optimizer, compute_loss, callbacks=()):
        self.model = DistributedDataParallel(model)
        self.optimizer, self.compute_loss = optimizer, compute_loss
        self.callbacks = list(callbacks)
        self.rank = dist.get_rank()
        self.step = 0

    def run(self, loader, epochs):
        for self.epoch in range(epochs):
            loader.sampler.set_epoch(self.epoch)  # place: epoch
            for batch in loader:  # place: loop self.step
                self.optimizer.zero_grad()  # place: step self.step
                loss = self.compute_loss(self.model, batch)
                loss.backward()  # place: loss self.step
                self.optimizer.step()  # place: update self.step
                self.step += 1
                for callback in self.callbacks:
                    callback.on_step_end(self, loss)
            for callback in self.callbacks:
                callback.on_epoch_end(self)
