"""Decoders as pure functions of a params dict: dense and MoE, cached and uncached."""

from policyopt.models.adapters import AdapterConfig, attach, merge
from policyopt.models.cache import Cache
from policyopt.models.chat import Chat, ChatConfig
from policyopt.models.config import ModelConfig, RopeScaling
from policyopt.models.loading import describe, load, save
from policyopt.models.moe import MoEConfig
from policyopt.models.tokenizer import Tokenizer
from policyopt.models.transformer import Hidden, Model, Output, build

__all__ = [
    'AdapterConfig',
    'Cache',
    'Chat',
    'ChatConfig',
    'Hidden',
    'MoEConfig',
    'Model',
    'ModelConfig',
    'Output',
    'RopeScaling',
    'Tokenizer',
    'attach',
    'build',
    'describe',
    'load',
    'merge',
    'save',
]
