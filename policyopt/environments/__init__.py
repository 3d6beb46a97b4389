"""Tasks of several turns: problems, the environments that answer, and play to imitate.

`task=dict(environment='calculator', kw=...)` names one of these, or the import path of a factory of
`Scenario`.
"""

from policyopt.environments.calculator import calculator
from policyopt.environments.guessing import guessing
from policyopt.environments.recorded import Recorded, Said, said
from policyopt.environments.scenario import (
    Demonstration,
    Play,
    Problem,
    Scenario,
    demonstrate,
    names,
    resolve,
)
from policyopt.environments.walk import walk

__all__ = [
    'Demonstration',
    'Play',
    'Problem',
    'Recorded',
    'Said',
    'Scenario',
    'calculator',
    'demonstrate',
    'guessing',
    'names',
    'resolve',
    'said',
    'walk',
]
