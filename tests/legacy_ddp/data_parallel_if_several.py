import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(4)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
inputs = torch.randn(40, 6)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
train_loader = DataLoader(dataset, 8)
test_loader = DataLoader(dataset, 40)

model = nn.Linear(6, 1)
if torch.cuda.device_count() > 1:
    print("Let's use", torch.cuda.device_count(), "GPUs!")
    # dim = 0 [30, xxx] -> [10, ...], [10, ...], [10, ...] on 3 GPUs
    model = nn.DataParallel(model)
model.to(device)

optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for epoch in range(3):
    for x, y in train_loader:
        x, y = x.to(device), y.to(device)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        for x, y in test_loader:
            print("test", F.mse_loss(model(x.to(device)), y.to(device)).item())

torch.save(model.module.state_dict() if hasattr(model, "module") else model.state_dict(), sys.argv[1])
