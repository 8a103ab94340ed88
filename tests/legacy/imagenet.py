"""ImageNet-style training: warm-up, several batches per allreduce, checkpoints, resuming."""
import argparse
import math
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
import torch.utils.data.distributed
import horovod.torch as hvd

parser = argparse.ArgumentParser(description='Synthetic ImageNet with Horovod',
                                 formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument('output', help='file for the final weights')
parser.add_argument('--checkpoint-format', default='{output}.checkpoint-{epoch}.pth.tar',
                    help='checkpoint file format')
parser.add_argument('--resume', action='store_true', help='go on from the last checkpoint')
parser.add_argument('--batches-per-allreduce', type=int, default=2,
                    help='number of batches processed locally before executing allreduce')
parser.add_argument('--batch-size', type=int, default=8)
parser.add_argument('--val-batch-size', type=int, default=16)
parser.add_argument('--epochs', type=int, default=3)
parser.add_argument('--base-lr', type=float, default=0.005, help='learning rate for a single GPU')
parser.add_argument('--warmup-epochs', type=float, default=1)
parser.add_argument('--momentum', type=float, default=0.9)
parser.add_argument('--wd', type=float, default=0., help='weight decay')
parser.add_argument('--seed', type=int, default=42)


class Metric(object):
    """Average of a value over the steps and over the workers."""

    def __init__(self, name):
        self.name = name
        self.sum = torch.tensor(0.)
        self.n = torch.tensor(0.)

    def update(self, val):
        self.sum += hvd.allreduce(val.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


def synthetic(count, seed):
    g = torch.Generator().manual_seed(seed)
    target = torch.randint(0, 5, (count,), generator=g)
    images = torch.randn(count, 3, 8, 8, generator=g) + target.view(-1, 1, 1, 1) * 0.3
    return torch.utils.data.TensorDataset(images, target)


def small_resnet():
    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
            self.norm = nn.GroupNorm(2, width)

        def forward(self, x):
            return torch.tanh(x + self.norm(self.conv(x)))

    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), Block(8), Block(8),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    train_loss = Metric('train_loss')
    train_accuracy = Metric('train_accuracy')

    for batch_idx, (data, target) in enumerate(train_loader):
        adjust_learning_rate(epoch, batch_idx)
        if args.cuda:
            data, target = data.cuda(), target.cuda()
        optimizer.zero_grad()
        # Split data into sub-batches of size batch_size
        for i in range(0, len(data), args.batch_size):
            data_batch = data[i:i + args.batch_size]
            target_batch = target[i:i + args.batch_size]
            output = model(data_batch)
            train_accuracy.update(accuracy(output, target_batch))
            loss = F.cross_entropy(output, target_batch)
            train_loss.update(loss)
            # Average gradients among sub-batches
            loss.div_(math.ceil(float(len(data)) / args.batch_size))
            loss.backward()
        # Gradient is applied across all ranks
        optimizer.step()
    if verbose:
        print('Train Epoch #{}: loss {:.4f}, accuracy {:.2f}'.format(
            epoch + 1, train_loss.avg.item(), 100. * train_accuracy.avg.item()))


def validate(epoch):
    model.eval()
    val_loss = Metric('val_loss')
    val_accuracy = Metric('val_accuracy')
    with torch.no_grad():
        for data, target in val_loader:
            if args.cuda:
                data, target = data.cuda(), target.cuda()
            output = model(data)
            val_loss.update(F.cross_entropy(output, target))
            val_accuracy.update(accuracy(output, target))
    if verbose:
        print('Validate Epoch #{}: loss {:.4f}, accuracy {:.2f}'.format(
            epoch + 1, val_loss.avg.item(), 100. * val_accuracy.avg.item()))


# From the learning rate of one worker to that of all of them over the first epochs, then in steps.
def adjust_learning_rate(epoch, batch_idx):
    if epoch < args.warmup_epochs:
        epoch += float(batch_idx + 1) / len(train_loader)
        lr_adj = 1. / hvd.size() * (epoch * (hvd.size() - 1) / args.warmup_epochs + 1)
    elif epoch < 2:
        lr_adj = 1.
    else:
        lr_adj = 1e-1
    for param_group in optimizer.param_groups:
        param_group['lr'] = args.base_lr * hvd.size() * args.batches_per_allreduce * lr_adj


def accuracy(output, target):
    pred = output.max(1, keepdim=True)[1]
    return pred.eq(target.view_as(pred)).cpu().float().mean()


def save_checkpoint(epoch):
    if hvd.rank() == 0:
        filepath = args.checkpoint_format.format(output=args.output, epoch=epoch + 1)
        state = {'model': model.state_dict(), 'optimizer': optimizer.state_dict()}
        torch.save(state, filepath)


if __name__ == '__main__':
    args = parser.parse_args()
    args.cuda = torch.cuda.is_available()
    allreduce_batch_size = args.batch_size * args.batches_per_allreduce

    hvd.init()
    torch.manual_seed(args.seed)
    if args.cuda:
        torch.cuda.set_device(hvd.local_rank())
        torch.cuda.manual_seed(args.seed)

    # If resuming, rank 0 looks for the last checkpoint.
    resume_from_epoch = 0
    if hvd.rank() == 0 and args.resume:
        for try_epoch in range(args.epochs, 0, -1):
            if os.path.exists(args.checkpoint_format.format(output=args.output, epoch=try_epoch)):
                resume_from_epoch = try_epoch
                break
    # Horovod: broadcast resume_from_epoch from rank 0 (which will have checkpoints) to other ranks.
    resume_from_epoch = hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0,
                                      name='resume_from_epoch').item()

    # Horovod: print logs on the first worker.
    verbose = 1 if hvd.rank() == 0 else 0

    train_dataset, val_dataset = synthetic(192, 1), synthetic(96, 2)
    train_sampler = torch.utils.data.distributed.DistributedSampler(
        train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = torch.utils.data.DataLoader(
        train_dataset, batch_size=allreduce_batch_size, sampler=train_sampler)
    val_sampler = torch.utils.data.distributed.DistributedSampler(
        val_dataset, num_replicas=hvd.size(), rank=hvd.rank())
    val_loader = torch.utils.data.DataLoader(val_dataset, batch_size=args.val_batch_size, sampler=val_sampler)

    model = small_resnet()
    if args.cuda:
        model.cuda()
    optimizer = optim.SGD(model.parameters(), lr=args.base_lr * args.batches_per_allreduce * hvd.size(),
                          momentum=args.momentum, weight_decay=args.wd)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(),
        backward_passes_per_step=args.batches_per_allreduce)

    # Restore from a previous checkpoint on the first worker, which broadcasts it to the others.
    if resume_from_epoch > 0 and hvd.rank() == 0:
        checkpoint = torch.load(args.checkpoint_format.format(output=args.output, epoch=resume_from_epoch))
        model.load_state_dict(checkpoint['model'])
        optimizer.load_state_dict(checkpoint['optimizer'])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(resume_from_epoch, args.epochs):
        train(epoch)
        validate(epoch)
        save_checkpoint(epoch)

    if verbose:
        torch.save(model.state_dict(), args.output)
