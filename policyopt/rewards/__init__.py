"""Rewards: functions from answers to one scalar per row."""

from policyopt.rewards.graded import Judge, graded, guarded

__all__ = ['Judge', 'graded', 'guarded']
