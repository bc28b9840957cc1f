"""A plan as a person reads it, and as one JSON document; sees only nouns."""
