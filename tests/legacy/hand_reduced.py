"""Policy-gradient style training whose gradients are averaged by hand."""

import argparse
import time

import horovod.torch as hvd
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Policy(nn.Module):
    def __init__(self, observations=6, actions=3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(observations, 16), nn.Tanh())
        self.actor = nn.Linear(16, actions)
        self.critic = nn.Linear(16, 1)

    def forward(self, obs):
        hidden = self.body(obs)
        return torch.log_softmax(self.actor(hidden), dim=-1), self.critic(hidden).squeeze(-1)


def average_gradients(model):
    """Sum over the workers, divided by their number."""
    for param in model.parameters():
        if param.grad is not None:
            param.grad.data = hvd.allreduce(param.grad.data, op=hvd.Sum) / hvd.size()


def average_gradients_by_name(model):
    """The same, leaving the division to Horovod."""
    for name, param in model.named_parameters():
        if param.grad is None:
            continue
        param.grad.copy_(hvd.allreduce(param.grad, name="grad." + name))


def rollouts(n, seed):
    g = torch.Generator().manual_seed(seed)
    obs = torch.randn(n, 6, generator=g)
    actions = torch.randint(0, 3, (n,), generator=g)
    rewards = (obs.argmax(dim=1) % 3 == actions).float()
    return TensorDataset(obs, actions, rewards)


def train_epoch(model, loader, optimizer, reduce, entropy_cost):
    losses = []
    for obs, actions, rewards in loader:
        log_probs, values = model(obs)
        advantage = rewards - values.detach()
        chosen = log_probs.gather(1, actions.unsqueeze(1)).squeeze(1)
        policy_loss = -(advantage * chosen).mean()
        value_loss = (rewards - values).pow(2).mean()
        entropy = -(log_probs.exp() * log_probs).sum(dim=1).mean()
        loss = policy_loss + 0.5 * value_loss - entropy_cost * entropy
        optimizer.zero_grad()
        loss.backward()
        reduce(model)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def load_config(args):
    """Only rank 0 knows the settings; everybody gets them."""
    config = None
    if hvd.rank() == 0:
        config = {"lr": args.lr, "batch_size": args.batch_size, "epochs": args.epochs, "entropy_cost": 0.01}
    return hvd.broadcast_object(config, root_rank=0, name="config")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("weights")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(100 + hvd.rank())  # made equal by the broadcast below
    config = load_config(args)

    dataset = rollouts(192, seed=4)
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, batch_size=config["batch_size"], sampler=sampler)

    model = Policy()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=config["lr"] / hvd.size())

    start = time.time()
    for epoch in range(config["epochs"]):
        sampler.set_epoch(epoch)
        reduce = average_gradients if epoch % 2 == 0 else average_gradients_by_name
        mean_loss = train_epoch(model, loader, optimizer, reduce, config["entropy_cost"])
        mean_loss = hvd.allreduce(torch.tensor(mean_loss), name="mean_loss").item()
        if hvd.rank() == 0:
            print("epoch %d: loss %.4f" % (epoch, mean_loss))

    timings = hvd.allgather_object({"rank": hvd.rank(), "seconds": time.time() - start})
    if hvd.rank() == 0:
        slowest = max(timings, key=lambda entry: entry["seconds"])
        print("slowest: rank {rank}, {seconds:.2f} s".format(**slowest))
        torch.save(model.state_dict(), args.weights)
    hvd.join()


if __name__ == "__main__":
    main()
