"""What a task of several turns is made of, and how play to imitate becomes a row of tokens."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from policyopt import checks
from policyopt.rewards.spec import Spec
from policyopt.sampling.environments import Environment

HOME = 'policyopt.environments'  # of names without a module


class Problem(NamedTuple):
    """A problem: its prompt, its right answer, and what else its environment reads (JSON)."""

    prompt: str
    answer: str
    hidden: Mapping[str, Any] = {}


@dataclasses.dataclass(frozen=True, eq=False)
class Scenario:
    """A task of several turns, or of one.

    Attributes:
      problems: (size, seed) -> problems; repeated prompts are dropped later.
      environment: (tokenizer, example) -> the world of one row. `example` is the problem's entry:
        `answer`, the hidden fields, `question` (its prompt). None: nothing answers, a row is one
        turn, and the warm start imitates `answer`; `expert` and `stops` say nothing then.
      expert: example -> a player to imitate, which maps the text that the environment answered last
        ('' at first) to the text of the next turn; it may be far from the best. None: no warm
        start.
      stops: characters that end a turn, besides end of sequence.
      scorer: of the final answer, which is the text of the last turn.
      version: of the problems; another one is prepared anew.
    """

    problems: Callable[[int, int], Iterator[Problem]]
    environment: Callable[[Any, Mapping[str, Any]], Environment] | None = None
    expert: Callable[[Mapping[str, Any]], Callable[[str], str]] | None = None
    stops: str = ''
    scorer: Spec = Spec('policyopt.rewards.scorers.exact')
    version: int = 1

    def __post_init__(self):
        for name in ('expert', 'stops'):
            if self.environment is None and getattr(self, name):
                raise ValueError(
                    f'{name} is {getattr(self, name)!r}, but a scenario without environment has '
                    'one turn, which ends with the end of sequence; legal is to leave it out'
                )


def names() -> tuple[str, ...]:
    """The scenarios of `policyopt.environments`."""
    module = importlib.import_module(HOME)
    return tuple(
        sorted(k for k, v in vars(module).items() if getattr(v, 'slot', '') == 'environment')
    )


def resolve(path: str, kwargs: Mapping[str, Any], where: str = 'task') -> Scenario:
    """Import the scenario factory at a dotted path, or of `policyopt.environments`, and call it.

    Raises ValueError or TypeError naming the field, its value and the nearest spelling.
    """
    module_name, _, name = path.rpartition('.')
    field = f'{where}.environment is {path!r}'
    try:
        module = importlib.import_module(module_name or HOME)
    except ModuleNotFoundError as error:
        raise ValueError(
            f'{field}: {error}. Is its folder on PYTHONPATH? A name without a module is one of '
            f'{HOME}.{checks.nearest(name, names())}'
        ) from None
    make = vars(module).get(name)
    if not inspect.isfunction(make):
        functions = {k for k, v in vars(module).items() if inspect.isfunction(v)}
        known = functions if module_name else names()
        raise ValueError(f'{field}: there is no such function.{checks.nearest(name, known)}')
    checks.check_arguments(make, (), kwargs)
    scenario = make(**kwargs)
    if not isinstance(scenario, Scenario):
        raise ValueError(f'{field}, which made {scenario!r}; legal is a Scenario')
    return scenario


@dataclasses.dataclass(frozen=True, eq=False)
class Play:
    """A scenario with a tokenizer: worlds of rows, and rows to imitate.

    Attributes:
      scenario: which.
      tokenizer: text to ids and back.
      stops: ids that end a turn, besides end of sequence.
    """

    scenario: Scenario
    tokenizer: Any
    stops: tuple[int, ...] = ()

    @classmethod
    def of(cls, scenario: Scenario, tokenizer: Any) -> Play:
        """The same with ids for its stops; ValueError where a stop is not one token."""
        ids = [tokenizer.encode(stop) for stop in scenario.stops]
        for stop, found in zip(scenario.stops, ids, strict=True):
            if len(found) != 1:
                raise ValueError(f'{stop!r} ends a turn, but is {len(found)} tokens; legal is one')
        return cls(scenario, tokenizer, tuple(i for (i,) in ids))

    def environment(self, example: Mapping[str, Any]) -> Environment:
        """The world of one row, fresh."""
        assert self.scenario.environment is not None
        return self.scenario.environment(self.tokenizer, example)

    def demonstration(self, example: Mapping[str, Any]) -> Demonstration:
        """What the expert does in it; ValueError where the scenario has none."""
        if self.scenario.expert is None:
            raise ValueError('the environment has nobody to imitate; legal is warm_start=None')
        player = self.scenario.expert(example)
        return demonstrate(self.environment(example), player, self.tokenizer, self.stops)


class Demonstration(NamedTuple):
    """Tokens after the prompt, and 1 for those that the expert chose."""

    tokens: list[int]
    mask: list[int]


def demonstrate(
    environment: Environment, player: Callable[[str], str], tokenizer: Any, stops: Sequence[int]
) -> Demonstration:
    """What a player and an environment say to each other until it is done.

    Args:
      environment: of the problem, fresh.
      player: as a `Scenario.expert` makes it.
      tokenizer: text to ids and back, with `eos_id`.
      stops: ids that end a turn; other turns get an end of sequence.
    """
    tokens: list[int] = []
    mask: list[int] = []
    seen = ''
    while True:
        turn = tokenizer.encode(player(seen))
        if not turn or turn[-1] not in stops:
            turn.append(tokenizer.eos_id)
        tokens, mask = tokens + turn, mask + [1] * len(turn)
        reply = environment.step(turn)
        if reply.done:
            return Demonstration(tokens, mask)
        answer = [int(i) for i in reply.tokens]
        tokens, mask = tokens + answer, mask + [0] * len(answer)
        seen = tokenizer.decode(answer)
