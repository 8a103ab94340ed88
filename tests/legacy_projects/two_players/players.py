from torch import nn


class Generator(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 4))


class Critic(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
