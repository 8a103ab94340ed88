"""Text classification on one process, or on many: --horovod False for a laptop."""

import argparse
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def str2bool(v):
    return str(v).lower() in ("yes", "true", "t", "1")


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--horovod", type=str2bool, default=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


class BagOfWords(nn.Module):
    def __init__(self, vocab=50, dim=12, classes=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens).mean(dim=1)))


def make_sentences(n, seed):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (n,), generator=g)
    tokens = torch.randint(0, 50, (n, 6), generator=g)
    tokens[:, 0] = labels
    return TensorDataset(tokens, labels)


def evaluate(model, loader, device):
    model.eval()
    correct, seen = 0, 0
    with torch.no_grad():
        for tokens, labels in loader:
            predicted = model(tokens.to(device)).argmax(dim=-1)
            correct += (predicted == labels.to(device)).sum().item()
            seen += labels.numel()
    return correct / max(seen, 1)


def main():
    args = get_args()
    random.seed(args.seed)
    torch.manual_seed(args.seed)

    if args.horovod:
        import horovod.torch as hvd

        hvd.init()

    rank = hvd.rank() if args.horovod else 0
    world_size = hvd.size() if args.horovod else 1
    if torch.cuda.is_available():
        device = torch.device("cuda", hvd.local_rank() if args.horovod else 0)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")

    train_set, dev_set = make_sentences(144, 1), make_sentences(60, 2)
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank) if args.horovod else None
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, shuffle=(sampler is None))
    dev_loader = DataLoader(dev_set, batch_size=32)

    model = BagOfWords().to(device)
    lr = args.lr * world_size if args.horovod else args.lr
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    if args.horovod:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    criterion = nn.CrossEntropyLoss()

    best = 0.0
    for epoch in range(args.epochs):
        model.train()
        if sampler is not None:
            sampler.set_epoch(epoch)
        running = 0.0
        for tokens, labels in train_loader:
            tokens, labels = tokens.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = criterion(model(tokens), labels)
            loss.backward()
            optimizer.step()
            running += loss.item()
        running /= len(train_loader)
        if args.horovod:
            running = hvd.allreduce(torch.tensor(running), name="loss").item()
        if rank == 0:
            accuracy = evaluate(model, dev_loader, device)
            best = max(best, accuracy)
            print(f"epoch {epoch}: loss {running:.4f} accuracy {accuracy:.3f} (best {best:.3f})")

    if rank == 0:
        torch.save(model.state_dict(), args.out)


if __name__ == "__main__":
    main()
