"""Train models, measure them, judge the claims: plans, the pool that runs them, and the records they leave."""
