"""Accelerate, and so Hugging Face's Trainer, wraps models and loaders that are shared already."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.process


def test_what_is_shared_is_neither_wrapped_nor_shared_out_again(run: Any, tmp_path: Path):
    script = """
        import json, os
        from pathlib import Path
        import torch
        from accelerate import Accelerator
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset
        import maniple

        torch.set_num_threads(1)
        worker = maniple.join()
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker.share(model, optimizer, rule=maniple.BSP())
        data = TensorDataset(torch.arange(40.0).view(-1, 1))
        address, _, port = os.environ["MANIPLE_MASTER"].rpartition(":")
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": port}  # and so on: as torchrun and `accelerate launch` do
        os.environ |= {"RANK": str(worker.rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(worker.rank)}
        accelerator = Accelerator(cpu=True)
        found = {"processes": accelerator.num_processes}
        loader = DataLoader(data, batch_size=4, sampler=worker.sampler(data))
        for name, act in {
            "model": lambda: accelerator.prepare(model, optimizer),
            "loader": lambda: sum(len(x) for x, in accelerator.prepare(loader)),
            "own loader": lambda: sum(len(x) for x, in loader),
        }.items():
            try:
                found[name] = str(act())
            except maniple.errors.InvalidArgument as error:
                found[name] = f"refused: {error}"
        Path(f"found-{worker.rank}").write_text(json.dumps(found))
    """
    done = run(script, "-n", "2", "--collectives", "torch")
    assert done.process.returncode == 0, done.output
    for rank in range(2):
        found = json.loads((tmp_path / f"found-{rank}").read_text())
        assert found["processes"] == 2
        assert found["model"].startswith("refused: the model is being wrapped in DistributedDataParallel after share()")
        assert found["loader"].startswith("refused: BatchSamplerShard shares these samples among 2 processes")
        assert found["own loader"] == "20"
