"""Data: tokenizer, tasks and their pipelines."""

from policyopt.data.tasks import (
    Item,
    Task,
    TaskConfig,
    batches,
    compact,
    make_task,
    supervised,
)
from policyopt.data.tokenizer import CharTokenizer, arithmetic_tokenizer

__all__ = [
    'CharTokenizer',
    'Item',
    'Task',
    'TaskConfig',
    'arithmetic_tokenizer',
    'batches',
    'compact',
    'make_task',
    'supervised',
]
