"""A small transformer predicts the next character of Python source code. The same script runs under every rule.

    python examples/char_transformer.py                                   # alone, on the standard library's sources
    maniple run -n 2 examples/char_transformer.py --characters 2000000 --epochs 3
    maniple run -n 2 --rule diloco:every=20 --overlap examples/char_transformer.py --text shakespeare.txt

The text is split into rows of --context characters; the last tenth of them is the test set. The result is in bits per
character, next to the entropy of the character frequencies alone.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import maniple

CHARACTERS = 128  # ASCII; all other characters are replaced by "?"


def standard_library() -> str:
    """Return the concatenated sources of the standard library, sorted by name."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in sources)


def cut(text: str, context: int) -> tuple[Tensor, Tensor]:
    """Split the text into rows of `context` + 1 characters: nine tenths for training, one tenth for the test."""
    codes = torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8).long()
    rows = codes.unfold(0, context + 1, context)
    return rows.split([len(rows) - len(rows) // 10, len(rows) // 10])


class Reader(nn.Module):
    """Character and position embeddings, causal attention layers, and a prediction after each character."""

    def __init__(self, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.places = nn.Parameter(torch.randn(context, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.output = nn.Linear(width, CHARACTERS)
        self.register_buffer("later", torch.ones(context, context, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the mean cross-entropy of all predictions in rows of context + 1 characters, in bits."""
        states = self.layers(self.characters(rows[:, :-1]) + self.places, self.later, is_causal=True)
        return nn.functional.cross_entropy(self.output(states).flatten(0, 1), rows[:, 1:].flatten()) / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a file to learn from (default: the standard library's sources)")
    parser.add_argument("--characters", type=int, default=200_000, help="maximum number of characters to read (200000)")
    parser.add_argument("--context", type=int, default=64, help="context length in characters (64)")
    parser.add_argument("--width", type=int, default=64, help="width of the hidden states, a multiple of 4 (64)")
    parser.add_argument("--layers", type=int, default=2, help="number of attention layers (2)")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the text (1)")
    parser.add_argument("--batch-size", type=int, default=16, help="rows per step and worker (16)")
    parser.add_argument("--lr", type=float, default=0.003, help="Adam's learning rate (0.003)")
    parser.add_argument("--threads", type=int, default=1, help="threads per worker; 0: the environment's default (1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads or torch.get_num_threads())
    worker = maniple.join()
    torch.manual_seed(worker.seed)
    text = args.text.read_text(encoding="utf-8", errors="replace") if args.text else standard_library()
    train, test = cut(text[: args.characters], args.context)
    model = Reader(args.context, args.width, args.layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    replica = worker.share(model, optimizer)
    batches = DataLoader(train, batch_size=args.batch_size, sampler=worker.sampler(train))
    parameters, who = sum(p.numel() for p in model.parameters()), f"worker {worker.rank} of {worker.world}"
    print(
        f"{who}: {train.numel():,} characters, {parameters:,} parameters, threads: {torch.get_num_threads()}",
        flush=True,
    )
    for epoch in worker.epochs(args.epochs):
        for rows in batches:
            optimizer.zero_grad()
            loss = model(rows)
            loss.backward()
            optimizer.step()
            if replica.steps % 20 == 0:
                worker.log(loss=loss, epoch=epoch)
                print(f"{who}: epoch {epoch}, {replica.steps:,} steps, {loss:.2f} bits in the last batch", flush=True)
    with replica.center(), torch.no_grad():
        bits = sum(model(rows) * len(rows) for rows in test.split(args.batch_size)) / len(test)
    shares = train.flatten().bincount() / train.numel()
    known = -(shares * shares.clamp(min=1e-9).log2()).sum()
    print(f"{who}: {bits:.2f} bits per character in the test of the center (by frequencies alone: {known:.2f})")


if __name__ == "__main__":
    main()
