"""The model computes the loss, of which DataParallel returns one for each GPU."""

import sys

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x, y):
        return self.criterion(self.net(x), y)


def main(path):
    torch.manual_seed(6)
    dataset = TensorDataset(torch.randn(32, 3), torch.randint(0, 2, (32,)))
    loader = DataLoader(dataset, batch_size=8, num_workers=0)
    model = nn.DataParallel(WithLoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(2):
        for x, y in loader:
            loss = model(x, y)
            loss = loss.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
    torch.save(model.module.net.state_dict(), path)


if __name__ == "__main__":
    main(sys.argv[1])
