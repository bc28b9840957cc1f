"""Device and cluster descriptions as YAML, a source for every number, and their loader."""
