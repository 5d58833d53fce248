"""Training: recipes, data, and an engine that shrinks the network as it goes."""
