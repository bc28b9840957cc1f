"""Reports of a plan for people and programs; they see only nouns, never a solver or estimator."""
