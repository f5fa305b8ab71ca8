"""Training of a user's model class by maniple's own loop: `python -m maniple.model FILE.py:CLASS`.

contract     what the class must have, checked before training
loop         epochs of training, validation and snapshots, and checkpoints to continue from them
recorder     where the time goes
validation   metrics on the validation data, over all workers, and of saved models
"""

from maniple.model.recorder import Recorder
from maniple.model.validation import top_errors

__all__ = ["Recorder", "top_errors"]
