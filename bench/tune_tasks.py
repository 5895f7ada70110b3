"""What bench/tune trains: of each task the model, its batches, and a training in one process with all ranks' batches."""

import argparse
from pathlib import Path

MOMENTUM = 0.9


class Digits:
    """Two layers; one in five of the pictures is held out."""

    def __init__(self, arguments):
        import torch

        rows = [[int(field) for field in line.split(",")] for line in Path(arguments.data).read_text().split()]
        table = torch.tensor(rows)
        held_out = torch.arange(len(table)) % 5 == 0
        self.known, self.held_out = table[~held_out], table[held_out]
        self.size = arguments.batch

    def model(self):
        from torch import nn

        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def loss(self, model, rows):
        from torch.nn import functional

        return functional.cross_entropy(model(rows[:, :64] / 16.0), rows[:, 64])

    def batch(self, rank, ranks, step):
        import torch

        draw = torch.Generator().manual_seed(step * ranks + rank)
        return self.known[torch.randint(len(self.known), (self.size,), generator=draw)]


class Lstm:
    """The model and the text of bench/torch_loss."""

    def __init__(self, arguments):
        from torch_text import TextTask

        size = {"model": "lstm", "hidden": 64, "windows": 4, "symbols": 32}
        self.task = TextTask(argparse.Namespace(text=arguments.text, **size))
        self.held_out = self.task.text.held_out()

    def model(self):
        return self.task.model()

    def loss(self, model, batch):
        return model(batch)

    def batch(self, rank, ranks, step):
        return self.task.batch(rank, ranks, step)


TASKS = {"digits": Digits, "lstm": Lstm}


def fresh(task, seed):
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return task.model()


def judged(task, model):
    import torch

    with torch.no_grad():
        return task.loss(model, task.held_out).item()


def training(task, rate, seed, arguments):
    """(clock, held-out loss), from time to time, until most_clocks or a loss that is not finite."""
    import torch

    model = fresh(task, seed)
    optimizer = torch.optim.SGD(model.parameters(), rate, MOMENTUM)
    for clock in range(arguments.most_clocks):
        if clock % arguments.every == 0:
            loss = judged(task, model)
            yield clock, loss
            if not loss < 1e6:
                return
        optimizer.zero_grad()
        losses = [task.loss(model, task.batch(rank, arguments.ranks, seed * 100_003 + clock)) for rank in range(arguments.ranks)]
        (sum(losses) / arguments.ranks).backward()
        optimizer.step()
