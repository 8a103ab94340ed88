import argparse
import builtins

import torch
import torch.utils.data
import utils
from engine import evaluate, train_one_epoch
from torch import nn


def main(args):
    utils.init_distributed_mode(args)
    torch.manual_seed(8)
    dataset = torch.utils.data.TensorDataset(torch.randn(30, 5), torch.randint(0, 3, (30,)))
    if args.distributed:
        train_sampler = torch.utils.data.distributed.DistributedSampler(dataset)
        test_sampler = torch.utils.data.distributed.DistributedSampler(dataset, shuffle=False)
    else:
        train_sampler = torch.utils.data.RandomSampler(dataset)
        test_sampler = torch.utils.data.SequentialSampler(dataset)
    train_loader = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=train_sampler, drop_last=True)
    test_loader = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=test_sampler)

    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    model_without_ddp = model
    if args.distributed:
        model = torch.nn.parallel.DistributedDataParallel(model)
        model_without_ddp = model.module
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for epoch in range(2):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        logger = train_one_epoch(model, criterion, optimizer, train_loader, epoch)
        scheduler.step()
        acc = evaluate(model, test_loader)
    values = torch.tensor([acc, logger.meters["loss"].global_avg, logger.meters["own"].global_avg])
    utils.save_on_master({"values": values, **model_without_ddp.state_dict()}, args.path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--dist-url", default="env://")
    own_print = builtins.print
    main(parser.parse_args())
    builtins.print = own_print
