"""From a model and a topology to a plan: the nouns, and the verbs that lead from one to the next."""
