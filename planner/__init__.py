"""Plans for uneven clusters: the nouns, the cost model and the search. Imports no torch."""

from hexiseq_triton.planner.plans import ExchangePlan, GroupPlan, Plan, RankShare, ReplicaPlan, Split

__all__ = ["ExchangePlan", "GroupPlan", "Plan", "RankShare", "ReplicaPlan", "Split"]
