import torch.nn.functional as F


class Accumulator:
    def __init__(self, model, optimizer, passes):
        self.model, self.optimizer, self.passes, self.count = model, optimizer, passes, 0

    def micro_step(self, x, y):
        (F.cross_entropy(self.model(x), y) / self.passes).backward()
        self.count += 1
        if self.count % self.passes == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
