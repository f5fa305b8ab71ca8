"""A custom controller: early stopping of the LSTM, as in Platoon's example.

    maniple run -n 2 --controller examples/lstm_controller.py:Early examples/lstm.py --ask
    maniple run -n 2 --controller examples/lstm_controller.py:Early --controller-arg patience=2 examples/lstm.py --ask

It lets one worker validate after every `every` batches, records all errors, and stops all workers when the last
`patience` of them did not improve on the best before. (The default controller does nearly the same without any code:
maniple run -n 2 --validate-every 100 --patience 4 examples/lstm.py --ask)
"""

from collections.abc import Mapping
from typing import Any

import maniple


class Early(maniple.Controller):
    """Answers `next` with train, validate or stop."""

    def __init__(self, every: int = 100, patience: int = 4, most: int = 4000) -> None:
        self.every, self.patience, self.most = every, patience, most
        self.state = {"validated_at": 0, "errors": []}  # survives a kill of this process; part of snapshots

    def handle_control(self, request: str, worker: int, info: Mapping[str, Any]) -> Any:
        if request == "next":
            if self.batches >= self.most:  # over all workers
                self.stop(f"{self.most} batches are enough")
            if self.is_stopping:
                return "stop"
            if self.batches - self.state["validated_at"] >= self.every:
                self.state["validated_at"] = self.batches
                return "validate"
            return "train"
        if request == "validated":
            errors = self.state["errors"]
            errors.append(info["loss"])
            if len(errors) > self.patience and min(errors[-self.patience :]) >= min(errors[: -self.patience]):
                self.stop(f"the best of {len(errors)} validations was {min(errors):.4f}")
            return {"validations": len(errors)}
        return super().handle_control(request, worker, info)  # all other requests
