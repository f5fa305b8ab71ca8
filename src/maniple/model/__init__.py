"""The model: a class of the user's own, trained by a loop that is ours. `python -m maniple.model FILE.py:CLASS`.

contract    what the class must have, checked before training
loop        epochs of training, validation and snapshots
recorder    where the time goes
validation  what is found on the validation data, over all workers
history     what is kept with an epoch, to go on from it
saved       models that were saved: validated again, and in between
"""

from maniple.model.recorder import Recorder
from maniple.model.validation import top_errors

__all__ = ["Recorder", "top_errors"]
