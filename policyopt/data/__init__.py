"""Data: tokenizer, tasks and their pipelines.

`policyopt.data.builders`, the tfds builders of prepared problems, loads when a task is made.
"""

from policyopt.data.gym import compact
from policyopt.data.pipeline import Mixture, batches
from policyopt.data.tasks import Item, Task, TaskConfig, make_task, supervised
from policyopt.data.tokenizer import CharTokenizer, arithmetic_tokenizer, ascii_tokenizer

__all__ = [
    'CharTokenizer',
    'Item',
    'Mixture',
    'Task',
    'TaskConfig',
    'arithmetic_tokenizer',
    'ascii_tokenizer',
    'batches',
    'compact',
    'make_task',
    'supervised',
]
