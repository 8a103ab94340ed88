from torch import nn


class MultiTask(nn.Module):
    def __init__(self, tasks):
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(tasks))
        self.scale = nn.Parameter(self.body.weight.new_ones(()), requires_grad=False)

    def forward(self, x, task):
        return self.heads[task](self.body(x).tanh()) * self.scale
