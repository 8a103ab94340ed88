import torch.nn.functional as F


class Engine:
    def __init__(self, model, optimizer, clip):
        self.model, self.optimizer, self.clip = model, optimizer, clip

    def fit(self, batches):
        self.model.train()
        for batch in batches:
            self.optimizer.zero_grad()
            self.loss(*batch).backward()
            self.optimizer.step()

    def loss(self, x, y):
        return F.cross_entropy(self.model.head(self.model.body(x)), y) + self.model.penalty()
