"""What bench/torch_loss trains on a text: an LSTM that says what comes next, as geeps_text does, or a
small GPT."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch_models import GPT2

HELD_OUT = 20  # one part of so many
EVALUATED = (48, 64)  # windows of the held-out text, and symbols in each


class Text:
    """Every file of a folder, or the one file; symbols are numbered as they occur. The last part is held out."""

    def __init__(self, path):
        files = sorted(f for f in path.iterdir() if f.is_file() and not f.is_symlink()) if path.is_dir() else [path]
        text = b"".join(f.read_bytes() for f in files)
        symbols = sorted(set(text))
        self.symbols = len(symbols)
        number = torch.zeros(256, dtype=torch.long)
        number[torch.tensor(symbols)] = torch.arange(self.symbols)
        whole = number[torch.frombuffer(bytearray(text), dtype=torch.uint8).long()]
        held_out = len(whole) // HELD_OUT
        if held_out < EVALUATED[1] + 2:
            raise ValueError(f"{path}: {len(whole)} bytes are too short a text")
        self.train, self.test = whole[:-held_out], whole[-held_out:]

    def batch(self, rank, ranks, step, windows, steps):
        """Of a rank's step: the same windows whatever exchanges the gradients."""
        random = torch.Generator().manual_seed(step * ranks + rank)
        starts = torch.randint(len(self.train) - steps, (windows,), generator=random)
        return torch.stack([self.train[start:start + steps + 1] for start in starts])

    def held_out(self):
        windows, steps = EVALUATED
        starts = torch.linspace(0, len(self.test) - steps - 1, windows).long()
        return torch.stack([self.test[start:start + steps + 1] for start in starts])


class Lstm(nn.Module):
    """Two layers; its loss is in nats a symbol."""

    def __init__(self, symbols, hidden):
        super().__init__()
        self.symbol = nn.Embedding(symbols, 64)
        self.layers = nn.LSTM(64, hidden, 2, batch_first=True)
        self.head = nn.Linear(hidden, symbols)

    def forward(self, batch):
        outputs, _ = self.layers(self.symbol(batch[:, :-1]))
        return functional.cross_entropy(self.head(outputs).flatten(0, 1), batch[:, 1:].flatten())


def gpt(symbols, context, width, layers):
    """GPT-2 in a small size, with heads of 64 and with its first parameters: what reads the residual
    stream has a deviation of 0.02, what adds to it less the more layers there are."""
    model = GPT2(symbols, context, width, layers, max(1, width // 64))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            adds = name.endswith(("projection.weight", "narrow.weight"))
            nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if adds else 0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    return model


class TextTask:
    """What a rank trains, on which batches, and how good it is."""

    factors = None  # it has no large fully connected layer

    def __init__(self, arguments):
        self.text = Text(Path(arguments.text))
        self.hidden, self.windows, self.symbols = arguments.hidden, arguments.windows, arguments.symbols
        self.layers = arguments.layers if arguments.model == "gpt" else None

    def model(self):
        if self.layers is None:
            return Lstm(self.text.symbols, self.hidden)
        return gpt(self.text.symbols, max(self.symbols, EVALUATED[1]), self.hidden, self.layers)

    def batch(self, rank, ranks, step):
        return self.text.batch(rank, ranks, step, self.windows, self.symbols)

    def judge(self, model):
        """(loss, nothing)"""
        return model(self.text.held_out()).item(), None
