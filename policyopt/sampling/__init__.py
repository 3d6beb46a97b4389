"""Sampling: rows of tokens with an exact record of how they were drawn."""

from policyopt.sampling.decode import SamplingConfig, pad_prompts, sample

__all__ = ['SamplingConfig', 'pad_prompts', 'sample']
