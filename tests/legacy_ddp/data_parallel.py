import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def train(model, loader, optimizer, criterion):
    model.train()
    total = 0.0
    for i, (x, y) in enumerate(loader):
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--batch-size", type=int, default=12)
    args = parser.parse_args()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 4), torch.randint(0, 3, (48,)))
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=False)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).to(device)
    model = nn.DataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss().to(device)
    for epoch in range(3):
        print(epoch, train(model, loader, optimizer, criterion))
    torch.save(model.state_dict(), args.path)


if __name__ == "__main__":
    main()
