"""Rewards: what an answer is worth and why, judged where it can do no harm.

A reward is a pure function of (text, tokens, example) that returns a `Verdict`; factories here make
them, and compose them. Judges run them on answers as these are drawn. Nothing here needs jax, so
processes that judge start quickly and stay small.
"""

from policyopt.rewards.code import code_tests
from policyopt.rewards.combine import all_of, audited, gated, graded, weighted_sum
from policyopt.rewards.environment import turns_total
from policyopt.rewards.formats import boxed, code_fence, overlong, think_block
from policyopt.rewards.judge import Judge, JudgeConfig, Local, Remarks, Round, make_judge
from policyopt.rewards.language import language_consistency
from policyopt.rewards.ledger import Ledger, Page
from policyopt.rewards.maths import math_equivalence
from policyopt.rewards.presets import dapo, magistral
from policyopt.rewards.scored import Calibration, reward_model
from policyopt.rewards.spec import Spec, build, read
from policyopt.rewards.steps import StepsConfig, by_step
from policyopt.rewards.verdict import (
    FAULTS,
    Case,
    Part,
    Reward,
    Score,
    Step,
    Verdict,
    describe,
    judged,
)
from policyopt.rewards.workers import JudgeError, Workers

__all__ = [
    'Calibration',
    'Case',
    'FAULTS',
    'Judge',
    'JudgeConfig',
    'JudgeError',
    'Ledger',
    'Local',
    'Page',
    'Part',
    'Remarks',
    'Reward',
    'Round',
    'Score',
    'Spec',
    'Step',
    'StepsConfig',
    'Verdict',
    'Workers',
    'all_of',
    'audited',
    'boxed',
    'build',
    'by_step',
    'code_fence',
    'code_tests',
    'dapo',
    'describe',
    'gated',
    'graded',
    'judged',
    'language_consistency',
    'magistral',
    'make_judge',
    'math_equivalence',
    'overlong',
    'read',
    'reward_model',
    'think_block',
    'turns_total',
    'weighted_sum',
]
