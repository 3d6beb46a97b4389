"""What a run would cost on TPUs that are not here: its programs compiled ahead of time."""

from policyopt.plan.costs import Costs, count
from policyopt.plan.hardware import CHIPS, Chip
from policyopt.plan.hlo import parse
from policyopt.plan.planning import fit, plan
from policyopt.plan.store import Store

__all__ = ['CHIPS', 'Chip', 'Costs', 'Store', 'count', 'fit', 'parse', 'plan']
