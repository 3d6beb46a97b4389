"""A guessing game whose environments are slow, fail and are late by chance, for tests of runs."""

import dataclasses
import random
import threading
import time

from policyopt import checks, environments
from policyopt.sampling import Reply

CHANCE = random.Random()  # another one in every process, on purpose


class Moody:
    def __init__(self, game):
        self.game = game

    def reset(self):
        return self.game.reset()

    def step(self, tokens):
        if threading.current_thread() is threading.main_thread():
            return self.game.step(tokens)  # those who show how to play are not disturbed
        mood = CHANCE.random()
        if mood < 0.3:
            time.sleep(0.02)
        elif mood < 0.36:
            raise OSError('no answer today')
        elif mood < 0.37:
            time.sleep(3)
        elif mood < 0.4:
            return Reply([5] * 1000)
        return self.game.step(tokens)


@checks.factory('environment')
def moody(digits=3, smallest=20, largest=31):
    game = environments.guessing(digits, smallest, largest)

    def environment(tokenizer, example):
        return Moody(game.environment(tokenizer, example))

    return dataclasses.replace(game, environment=environment)
