#!/usr/bin/env python3
"""Fine-tuning of a small sequence model with gradient accumulation."""
import argparse
import os

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import horovod.torch as hvd


class Tagger(nn.Module):
    def __init__(self, vocab_size=30, hidden=12, tags=5):
        super().__init__()
        self.emb = nn.Embedding(vocab_size, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, tags)

    def forward(self, ids, labels=None):
        states, _ = self.rnn(self.emb(ids))
        logits = self.out(states)
        if labels is None:
            return logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss, logits


def load_data(count, seed):
    gen = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 30, (count, 7), generator=gen)
    return TensorDataset(ids, ids % 5)


def get_schedule(optimizer, warmup, total):
    def scale(step):
        if step < warmup:
            return (step + 1) / warmup
        return max(0.0, (total - step) / max(1, total - warmup))
    return LambdaLR(optimizer, scale)


def evaluate(model, device):
    model.eval()
    dataset = load_data(48, seed=2)
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    right = total = 0
    with torch.no_grad():
        for ids, labels in DataLoader(dataset, batch_size=16, sampler=sampler):
            pred = model(ids.to(device)).argmax(-1).cpu()
            right += pred.eq(labels).sum().item()
            total += labels.numel()
    counts = hvd.allreduce(torch.tensor([right, total], dtype=torch.float64), op=hvd.Sum, name='eval_counts')
    return (counts[0] / counts[1]).item()


def main(args):
    hvd.init()
    torch.manual_seed(args.seed)
    device = torch.device('cuda', hvd.local_rank()) if torch.cuda.is_available() else torch.device('cpu')
    if device.type == 'cuda':
        torch.cuda.set_device(device)

    dataset = load_data(192, seed=1)
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=True, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler, drop_last=True)
    steps_per_epoch = len(loader) // args.accum

    model = Tagger().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=args.accum,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    scheduler = get_schedule(optimizer, warmup=2, total=steps_per_epoch * args.epochs)

    optimizer.zero_grad()
    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        total = 0.0
        for i, batch in enumerate(loader):
            ids, labels = (t.to(device) for t in batch)
            loss, _ = model(ids, labels)
            loss = loss / args.accum
            loss.backward()
            total += loss.item() * args.accum
            if (i + 1) % args.accum == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accuracy = evaluate(model, device)
        if hvd.rank() == 0:
            print(f'| epoch {epoch:2d} | lr {scheduler.get_last_lr()[0]:.5f} '
                  f'| loss {total / len(loader):.4f} | accuracy {accuracy:.3f} |')

    if hvd.rank() == 0:
        os.makedirs(os.path.dirname(os.path.abspath(args.model_path)), exist_ok=True)
        torch.save(model.state_dict(), args.model_path)


if __name__ == '__main__':
    ap = argparse.ArgumentParser()
    ap.add_argument('model_path')
    ap.add_argument('--epochs', type=int, default=2)
    ap.add_argument('--batch', type=int, default=8)
    ap.add_argument('--accum', type=int, default=4, help='mini-batches per optimizer step')
    ap.add_argument('--lr', type=float, default=0.01)
    ap.add_argument('--seed', type=int, default=21)
    main(ap.parse_args())
