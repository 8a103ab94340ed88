"""Autoencoder; Horovod's names are imported one by one."""
import argparse
import time

import torch
from horovod.torch import DistributedOptimizer, broadcast_optimizer_state, broadcast_parameters
from horovod.torch.mpi_ops import Average, Sum, allgather, allreduce, init, local_rank, rank, size
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class AutoEncoder(nn.Module):
    def __init__(self, n_in=20, n_code=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(n_in, 10), nn.Tanh(), nn.Linear(10, n_code))
        self.decoder = nn.Sequential(nn.Linear(n_code, 10), nn.Tanh(), nn.Linear(10, n_in))

    def forward(self, x):
        code = self.encoder(x)
        return self.decoder(code), code


def signals(count, seed):
    gen = torch.Generator().manual_seed(seed)
    phase = torch.rand(count, 1, generator=gen) * 6.28
    freq = 1 + torch.randint(0, 3, (count, 1), generator=gen)
    return torch.sin(freq * torch.linspace(0, 3, 20) + phase)


def train_one_epoch(net, loader, opt, device, args):
    net.train()
    total = torch.zeros(1)
    count = torch.zeros(1)
    for (x,) in loader:
        x = x.to(device, non_blocking=True)
        opt.zero_grad()
        out, code = net(x)
        loss = (out - x).pow(2).mean() + args.sparsity * code.abs().mean()
        loss.backward()
        opt.step()
        total += loss.item() * len(x)
        count += len(x)
    total = allreduce(total, name='train.total', op=Sum)
    count = allreduce(count, name='train.count', op=Sum)
    return (total / count).item()


@torch.no_grad()
def collect_codes(net, loader, device):
    net.eval()
    codes = torch.cat([net(x.to(device))[1].cpu() for (x,) in loader])
    return allgather(codes, name='codes')


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('path', type=str)
    parser.add_argument('-e', '--epochs', type=int, default=3)
    parser.add_argument('-b', '--batch-size', type=int, default=12)
    parser.add_argument('--lr', type=float, default=0.003)
    parser.add_argument('--sparsity', type=float, default=0.01)
    args = parser.parse_args()

    init()
    torch.manual_seed(99)
    device = 'cpu'
    if torch.cuda.is_available():
        device = 'cuda:%d' % local_rank()
        torch.cuda.set_device(local_rank())

    train_data = TensorDataset(signals(180, 5))
    sampler = DistributedSampler(train_data, num_replicas=size(), rank=rank(), shuffle=True)
    loader = DataLoader(train_data, batch_size=args.batch_size, sampler=sampler)
    probe_data = TensorDataset(signals(48, 6))
    probe_sampler = DistributedSampler(probe_data, num_replicas=size(), rank=rank(), shuffle=False)
    probe_loader = DataLoader(probe_data, batch_size=24, sampler=probe_sampler)

    net = AutoEncoder().to(device)
    opt = torch.optim.Adam(net.parameters(), lr=args.lr * size())
    broadcast_parameters(net.state_dict(), root_rank=0)
    broadcast_optimizer_state(opt, root_rank=0)
    opt = DistributedOptimizer(opt, named_parameters=net.named_parameters(), op=Average)

    for epoch in range(args.epochs):
        began = time.time()
        sampler.set_epoch(epoch)
        loss = train_one_epoch(net, loader, opt, device, args)
        if rank() == 0:
            print('epoch %d of %d: loss %.5f, %.2f s on %d workers'
                  % (epoch, args.epochs, loss, time.time() - began, size()))

    codes = collect_codes(net, probe_loader, device)
    spread = allreduce(codes.std(dim=0), name='spread')
    if rank() == 0:
        print('codes', tuple(codes.shape))
        result = dict(net.state_dict())
        result['codes.spread'] = spread
        torch.save(result, args.path)


if __name__ == '__main__':
    main()
